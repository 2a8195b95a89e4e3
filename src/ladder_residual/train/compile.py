"""``torch.compile`` on what a layer computes, never on what it communicates.

Each module of a decoder layer (norm + attention, norm + MLP) becomes one compiled region; the residual stream, the all-reduces and
the hooks of FSDP stay outside, as written in ``core/wiring.py``. Inductor moves or fuses across a late wait (measured: wrong logits
without an error), so no wait is ever shown to it. All layers share the compiled code: it is compiled once, not once a layer.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import FunctionType
from typing import Any

import torch
from transformers import PreTrainedModel

from ..models.hf import EAGER, Compute, RewiredLayer, both_partials, decoder_layers, module_partial


def compile_layers(model: PreTrainedModel, *, dynamic: bool | None = None, shared: bool = False) -> PreTrainedModel:
    """Compile the layers of a rewired model in place, unless they are. ``dynamic`` as in ``torch.compile``.

    Works with gradients, gradient checkpointing, autocast, FSDP2 and tensor parallelism. Calls with a cache stay uncompiled.
    ``shared``: use the code that earlier shared models of this process compiled; for models of one shape in turn.
    """
    compute = _shared_compute(dynamic) if shared else _compiled_compute(dynamic)
    for layer in decoder_layers(model):
        if not isinstance(layer, RewiredLayer):
            raise ValueError(
                f"{type(layer).__name__} is no rewired layer: rewire the model first, with wiring standard to change nothing"
            )
        if layer.compute is EAGER:
            layer.compute = compute
    return model


def _compiled_compute(dynamic: bool | None) -> Compute:
    functions = (module_partial, module_partial, both_partials)
    return Compute(*(torch.compile(own_code_object(function), dynamic=dynamic) for function in functions))


_shared_compute = cache(_compiled_compute)


def own_code_object(function: Callable[..., Any]) -> Callable[..., Any]:
    """A copy of ``function``. Dynamo counts compiled variants per code object, and past a limit calls fall back to eager: a teacher,
    a student and a second model must not use up each other's share."""
    assert isinstance(function, FunctionType)
    copy = FunctionType(
        function.__code__.replace(), function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy
