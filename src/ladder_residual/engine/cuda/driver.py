"""The CUDA driver library, for the few calls that neither torch nor Triton makes."""

from __future__ import annotations

import ctypes
from functools import cache


@cache
def driver() -> ctypes.CDLL | None:
    """None on a machine without CUDA."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
