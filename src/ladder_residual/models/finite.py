"""NaN and infinity checks: weights and logits that hold one stop the run, which names the tensor, the step and the layer.

A sum reads a tensor at memory speed, and no NaN or infinity vanishes in it. A sum can overflow: then ``aminmax`` decides, a slower pass,
among whose two results they always are.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

_FLOAT16 = "; float16 overflows beyond 65504: try --dtype bfloat16 or float32"


class NonFiniteError(ValueError):
    """A tensor that must be finite is not."""


def fix_for(dtype: torch.dtype) -> str:
    """What to try, if the dtype may be the reason."""
    return _FLOAT16 if dtype == torch.float16 else ""


def is_finite(tensor: Tensor) -> bool:
    if tensor.numel() == 0 or not tensor.is_floating_point():
        return True
    return math.isfinite(tensor.sum()) or all(math.isfinite(bound) for bound in torch.aminmax(tensor))


def check_weight(name: str, tensor: Tensor, where: object) -> None:
    if not is_finite(tensor):
        raise NonFiniteError(
            f"{where}: {name} holds NaN or infinite numbers (generate, chat and eval load it all the same with --allow-nonfinite)"
        )


def cast_finite(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """``tensor`` as ``dtype``; NonFiniteError if it does not fit, or never was finite."""
    cast = tensor.to(dtype)
    if not is_finite(cast):
        raise NonFiniteError(f"{name} overflows as {dtype}" if is_finite(tensor) else f"{name} holds NaN or infinite numbers")
    return cast


@contextmanager
def finite_logits(model: nn.Module) -> Iterator[None]:
    """Stop at the first forward of ``model`` with logits of NaN, of +inf, or of -inf alone, naming the step and the layer."""
    steps = 0

    def check(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        nonlocal steps
        steps += 1
        logits = output.logits
        # Ranks that exchange only their best logits leave -inf elsewhere; those are meant. NaN is the largest of a row.
        if is_finite(logits.amax(-1)):
            return
        dtype = next(module.parameters()).dtype
        raise NonFiniteError(f"the logits of step {steps} are NaN or infinite{_first_layer(output)}{fix_for(dtype)}")

    hook = model.register_forward_hook(check, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()


def _first_layer(output: Any) -> str:
    """By the keys and values in the cache: they show what each layer read."""
    for index, layer in enumerate(getattr(getattr(output, "past_key_values", None), "layers", ())):
        if any(isinstance(part, Tensor) and not is_finite(part) for part in (layer.keys, layer.values)):
            return f", first seen in what layer {index} reads"
    return ""
