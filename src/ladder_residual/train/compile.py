"""``torch.compile`` on what a layer computes, never on what it communicates.

Each module of a decoder layer (norm + attention, norm + MLP) becomes one compiled region; the residual stream, the sums over
ranks and the hooks of FSDP stay outside, as written in ``wiring.py``. Inductor moves or fuses across a late wait (measured: wrong
logits without an error), so no wait is ever shown to it. All layers share the compiled code: it is compiled once, not once a layer.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import FunctionType
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..model import Compute, RewiredLayer, both_partials, decoder_layers, module_partial


def compile_blocks(
    model: PreTrainedModel, *, dynamic: bool | None = None, mode: str | None = None, shared: bool = False
) -> PreTrainedModel:
    """Compile the layers of a rewired or plain Hugging Face model, in place. ``dynamic`` and ``mode`` as in ``torch.compile``.

    Works with gradients, gradient checkpointing, autocast, FSDP2 and tensor parallelism. Calls with a cache stay uncompiled.
    ``shared``: use the compiled code of earlier models of this process that were shared, too, for models of one shape in turn.
    """

    def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
        return torch.compile(own_code(function), dynamic=dynamic, mode=mode)

    compute = _shared_compute(dynamic, mode) if shared else _compiled_compute(compiled)
    whole_layers: dict[type, Callable[..., Any]] = {}
    layer: Any
    for layer in decoder_layers(model):
        if isinstance(layer, RewiredLayer):
            layer.compute = compute
            continue
        plain: Any = layer.__class__.__mro__[2] if isinstance(layer, _CompiledLayer) else layer.__class__
        if plain not in whole_layers:
            whole_layers[plain] = compiled(plain.forward)
        layer.__class__ = _compiled_layer_class(plain)
        layer.compiled_forward = whole_layers[plain]
    return model


def _compiled_compute(compiled: Callable[..., Any]) -> Compute:
    return Compute(compiled(module_partial), compiled(module_partial), compiled(both_partials))


@cache
def _shared_compute(dynamic: bool | None, mode: str | None) -> Compute:
    return _compiled_compute(lambda function: torch.compile(own_code(function), dynamic=dynamic, mode=mode))


def own_code(function: Callable[..., Any]) -> Callable[..., Any]:
    """A copy with a code object of its own. Compiled variants are counted per code object, and past a limit calls fall back to
    eager: a teacher, a student and a second model must not use up each other's share."""
    assert isinstance(function, FunctionType)
    copy = FunctionType(
        function.__code__.replace(), function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


class _CompiledLayer(nn.Module):
    """Mixed in before a plain decoder layer class (a teacher that keeps its own wiring): the whole layer is one region."""

    compiled_forward: Callable[..., Any]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("past_key_values") is not None:
            return super().forward(*args, **kwargs)
        return self.compiled_forward(self, *args, **kwargs)


@cache
def _compiled_layer_class(base: type[nn.Module]) -> type[nn.Module]:
    return type(f"Compiled{base.__name__}", (_CompiledLayer, base), {"__module__": __name__})
