"""The kernel of ``emulated_all_reduce``."""

from __future__ import annotations

import triton
import triton.language as tl

from ladder_residual.engine.kernels.elementwise import timed_copy


@triton.jit
def copy_until(in_ptr, out_ptr, count, nanoseconds_ptr, BLOCK: tl.constexpr):
    """The engine's emulated all-reduce with the time in memory, so that a CUDA graph reads it anew."""
    timed_copy(in_ptr, out_ptr, count, tl.load(nanoseconds_ptr), BLOCK, 0)
