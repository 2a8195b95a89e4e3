"""Ladder Residual: transformers whose tensor-parallel communication hides behind compute.

Importing this package lets transformers' Auto classes load rewired checkpoints. It imports neither torch nor transformers for
that: registration waits until transformers' Auto classes are imported (``registration.py``).
"""

from __future__ import annotations

from typing import Any

from .config import Wiring
from .registration import register_when_imported

__version__ = "0.1.0"
__all__ = ["Wiring", "__version__", "rewire"]

register_when_imported()


def __getattr__(name: str) -> Any:
    if name == "rewire":
        from .model import rewire

        return rewire
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
