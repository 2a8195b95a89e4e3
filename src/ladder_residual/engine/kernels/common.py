"""What the kernels share: PDL prologue, reads of the residual stream and of weights, heads of the QKV projection.

Only this package imports Triton at module level, and the rest imports it inside functions: CPU builds of torch come without Triton.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import cuda as tl_cuda

from ..cuda.pdl import PdlMode

# Values of a kernel's PDL argument: a kernel reads globals only as constexpr.
OFF = tl.constexpr(int(PdlMode.OFF))
TRIGGER_THEN_WAIT = tl.constexpr(int(PdlMode.TRIGGER_THEN_WAIT))
WAIT_THEN_TRIGGER = tl.constexpr(int(PdlMode.WAIT_THEN_TRIGGER))
WAIT_AFTER_COMPUTE = tl.constexpr(int(PdlMode.WAIT_AFTER_COMPUTE))
WAIT_BEFORE_NEWEST = tl.constexpr(int(PdlMode.WAIT_BEFORE_NEWEST))


@triton.jit
def wait_for_previous_kernel(PDL: tl.constexpr):
    """Below this line the previous kernel's output is complete. Above it a kernel may read weights only."""
    if PDL == TRIGGER_THEN_WAIT:
        tl_cuda.gdc_launch_dependents()
    if PDL != OFF:
        tl_cuda.gdc_wait()
    if PDL == WAIT_THEN_TRIGGER:
        tl_cuda.gdc_launch_dependents()


@triton.jit
def wait_then_trigger():
    """Waits first, because the next kernel may rely on everything before this kernel being complete. A second call does nothing."""
    tl_cuda.gdc_wait()
    tl_cuda.gdc_launch_dependents()


@triton.jit
def load_stream(
    x_ptr, d0_ptr, d1_ptr, d2_ptr, row, k, mask, KEEP_STREAM: tl.constexpr, NUM_ADDS: tl.constexpr, CACHE: tl.constexpr
):  # fmt: skip
    """The residual stream at columns ``k`` of the row that starts at ``row``, plus NUM_ADDS of three module outputs, in float32."""
    if KEEP_STREAM:
        x = tl.load(x_ptr + row + k, mask=mask, other=0.0, cache_modifier=CACHE)
    else:
        x = tl.zeros(k.shape, tl.float32)
    if NUM_ADDS > 0:
        x += tl.load(d0_ptr + row + k, mask=mask, other=0.0, cache_modifier=CACHE).to(tl.float32)
    if NUM_ADDS > 1:
        x += tl.load(d1_ptr + row + k, mask=mask, other=0.0, cache_modifier=CACHE).to(tl.float32)
    if NUM_ADDS > 2:
        x += tl.load(d2_ptr + row + k, mask=mask, other=0.0, cache_modifier=CACHE).to(tl.float32)
    return x


@triton.jit
def weight_rows(block, N, ROWS: tl.constexpr, GATED: tl.constexpr):
    """The rows of W in a block of ROWS, and the output channel of each: gate and up of one channel are neighbours."""
    r = tl.arange(0, ROWS)
    if GATED:
        channel = block * (ROWS // 2) + r // 2
        return channel + (r % 2) * N, channel
    else:
        return block * ROWS + r, block * ROWS + r


@triton.jit
def split_even_odd(x, WIDTH: tl.constexpr):
    return tl.split(tl.reshape(x, [WIDTH // 2, 2]))


@triton.jit
def sum_within_thread(products, ROWS: tl.constexpr, WIDTH: tl.constexpr, HELD: tl.constexpr):
    """Adds the HELD neighbours of a row that one thread holds: no exchange between threads, fewer registers."""
    return tl.sum(tl.reshape(products, [ROWS, WIDTH // HELD, HELD]), axis=2)


@triton.jit
def multiply_packed(w, even, odd, TYPE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Packed weights (ROWS, WIDTH // 2) times x, given as its even and odd elements: partial sums (ROWS, WIDTH // 8). TYPE of one
    weight is the element type of the norm's weights or of the input."""
    tl.static_assert(w.dtype.primitive_bitwidth == 2 * TYPE.primitive_bitwidth, "a packed pair is twice as wide as a weight")
    if tl.bfloat16 == TYPE:  # the upper half of a float32
        first = (w << 16).to(tl.float32, bitcast=True)
        second = (w & -65536).to(tl.float32, bitcast=True)
    elif tl.float16 == TYPE:
        first = w.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        second = (w >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        first = w.to(tl.int32).to(tl.float32, bitcast=True)
        second = (w >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    return sum_within_thread(first * even[None, :] + second * odd[None, :], ROWS, WIDTH // 2, 4)


@triton.jit
def load_heads(
    qkv_ptr, squares_ptr, bias_ptr, norm_ptr, b, width, first, cols, row_mask, eps, hidden,
    SPLIT_K: tl.constexpr, NORMED: tl.constexpr, BIAS: tl.constexpr, HEAD_NORM: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """Heads that start at columns ``first`` of the QKV projection, finished: split-K parts added, scaled by the norm of the stream, bias
    added, head-normed. ``cols`` permutes the DIM columns (for the rotation)."""
    index = first[:, None] + cols[None, :]
    mask = row_mask[:, None]
    if SPLIT_K > 1:  # parts along the hidden size; with one sequence not yet divided by the stream's rms
        y = tl.zeros(index.shape, tl.float32)
        for s in tl.static_range(SPLIT_K):
            y += tl.load(qkv_ptr + (s * tl.num_programs(0) + b) * width + index, mask=mask, other=0.0)
        if not NORMED:
            total = 0.0
            for s in tl.static_range(SPLIT_K):
                total += tl.load(squares_ptr + s)
            y = y * tl.rsqrt(total / hidden + eps)
    else:
        y = tl.load(qkv_ptr + b * width + index, mask=mask, other=0.0).to(tl.float32)
    if BIAS:
        y += tl.load(bias_ptr + index, mask=mask, other=0.0).to(tl.float32)
    if HEAD_NORM:
        g = tl.load(norm_ptr + cols).to(tl.float32)
        y = y * tl.rsqrt(tl.sum(y * y, axis=1) / DIM + eps)[:, None] * g[None, :]
    return y


@triton.jit
def store_token(cache_ptr, scale_ptr, x, rows, row_mask, dims, DIM: tl.constexpr):
    """Keys or values (heads, DIM) go into ``rows`` of the cache. Returns what it holds of them (``dequantized``)."""
    place = rows[:, None] * DIM + dims[None, :]
    if scale_ptr is None:
        held = x.to(cache_ptr.dtype.element_ty)
        tl.store(cache_ptr + place, held, mask=row_mask[:, None])
        return (held,)
    else:  # ``cache.to_fp8``
        top = tl.maximum(tl.max(tl.abs(x), axis=1), 2.0**-100)
        scale = (top.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True) * 2.0**-7
        held = (x / scale[:, None]).to(cache_ptr.dtype.element_ty)
        tl.store(cache_ptr + place, held, mask=row_mask[:, None])
        tl.store(scale_ptr + rows, scale.to(scale_ptr.dtype.element_ty), mask=row_mask)
        return held, scale


@triton.jit
def dequantized(held, TYPE: tl.constexpr):
    """Rows of the cache: numbers alone, or in E4M3 with a power of two for each row, which 16 bits hold exactly."""
    if len(held) > 1:
        return held[0].to(TYPE) * held[1].to(TYPE)[:, None]
    else:
        return held[0].to(TYPE)
