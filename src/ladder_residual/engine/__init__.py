"""The CUDA fast path. Names are imported on first use, so that ``import ladder_residual.engine`` needs neither CUDA nor Triton."""

from __future__ import annotations

from importlib import import_module
from typing import Any

_WHERE = {
    "DecodeEngine": "decoder",
    "EngineSpec": "spec",
    "RankSizes": "spec",
    "ReferenceDecoder": "reference",
    "parse_link": "emulate",
    "plan_steps": "schedule",
    "random_weights": "weights",
    "stack_weights": "weights",
    "read_bandwidth": "roofline",
}
__all__ = sorted(_WHERE)


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_WHERE[name]}"), name)
