"""GEMM for a few sequences (2 to 16): the weights stream through the tensor cores once, everything else is fused around them.

A batch this small is still bound by memory, but its multiplications no longer hide behind the loads on the CUDA cores: ``tl.dot`` does
them, with the weights' rows as its rows and the sequences padded to the 16 columns it needs. The first tile of weights is loaded
before the wait; the compiler pipelines the others. Words of quantised weights are multiplied a place at a time, each with the columns of
x that its numbers stand for: the numbers stay in the registers that decoded them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .common import wait_for_previous_kernel
from .quantized import PLAIN, WORDS, load_scales, weights_at, word_columns

MIN_COLUMNS = 16  # the least tl.dot takes


@triton.jit
def _load_weights(
    w_ptrs, scale_ptr, zero_ptr, rows, row_mask, start, at, inside, PACK: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr,
    FORMAT: tl.constexpr,
):  # fmt: skip
    """The tile from column ``start`` of the rows' part on, and the scales of its words at columns ``at``, if they are of groups."""
    w = tl.load(w_ptrs + start // PACK, mask=row_mask[:, None] & inside[None, :], other=0, eviction_policy="evict_first")
    if FORMAT == PLAIN:
        return w
    elif GROUP == 0:
        return (w,)
    else:
        return (w,) + load_scales(scale_ptr, zero_ptr, rows, row_mask, start + at, K, GROUP)


@triton.jit
def _load_inputs(x_ptrs, start, mask, PACK: tl.constexpr, FORMAT: tl.constexpr):
    """x of a tile; with quantised weights one for each place of a word."""
    if FORMAT == PLAIN:
        return tl.trans(tl.load(x_ptrs + start, mask=mask, other=0.0))
    else:
        x = (tl.trans(tl.load(x_ptrs + start, mask=mask, other=0.0)),)
        for place in tl.static_range(1, PACK):
            x = x + (tl.trans(tl.load(x_ptrs + start + WORDS * place, mask=mask, other=0.0)),)  # type: ignore[assignment]
        return x


@triton.jit
def _dot(w, x, y, PACK: tl.constexpr, FORMAT: tl.constexpr):
    if FORMAT == PLAIN:
        return tl.dot(w, x, y)
    else:
        for place in tl.static_range(PACK):
            y = tl.dot(weights_at(w, place, FORMAT).to(x[place].dtype), x[place], y)
        return y


@triton.jit
def small_batch_gemm(
    in_ptr,  # (B, K)
    w_ptr,  # (N, K), or (2 * N, K) for gate over up
    stream_ptr,  # float32 (B, N), with ADD_STREAM
    partial_ptr,  # (B, N), with ADD_PARTIAL
    out_ptr,  # (B, N); SPLIT_K > 1: float32 (SPLIT_K, B, N)
    scale_ptr,  # of quantised weights (rows, groups of K), else None
    zero_ptr,  # zero points, as the scales, or None
    stream_scale,
    B,
    N,
    K: tl.constexpr,
    ROWS: tl.constexpr,  # rows of W per program; as many again of up
    BLOCK_K: tl.constexpr,
    SPLIT_K: tl.constexpr,  # above 1 where the rows alone give too few programs to fill the GPU
    COLUMNS: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    GATED: tl.constexpr,
    ADD_STREAM: tl.constexpr,
    ADD_PARTIAL: tl.constexpr,
    PACK: tl.constexpr,  # weights in an element of w_ptr: 1, with quantised ones 4 or 8
    GROUP: tl.constexpr,  # as in gemv.py
    FORMAT: tl.constexpr,
    PDL: tl.constexpr,
):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row_mask = rows < N
    part = tl.program_id(1)
    PART_K: tl.constexpr = K // SPLIT_K
    words = tl.arange(0, BLOCK_K // PACK)
    offs = word_columns(BLOCK_K, PACK) if FORMAT != PLAIN else words
    b = tl.arange(0, COLUMNS)
    w_ptrs = w_ptr + rows.to(tl.int64)[:, None] * (K // PACK) + (part * (PART_K // PACK) + words)[None, :]
    up_ptrs = w_ptrs + N.to(tl.int64) * (K // PACK)
    x_ptrs = in_ptr + b[:, None] * K + (part * PART_K + offs)[None, :]
    inside = offs < PART_K
    at = part * PART_K + offs
    w = _load_weights(w_ptrs, scale_ptr, zero_ptr, rows, row_mask, 0, at, inside, PACK, K, GROUP, FORMAT)
    if GATED:
        up_w = _load_weights(up_ptrs, scale_ptr, zero_ptr, N + rows, row_mask, 0, at, inside, PACK, K, GROUP, FORMAT)
    wait_for_previous_kernel(PDL)
    x = _load_inputs(x_ptrs, 0, (b < B)[:, None] & inside[None, :], PACK, FORMAT)
    y = _dot(w, x, tl.zeros([ROWS, COLUMNS], tl.float32), PACK, FORMAT)
    if GATED:
        up = _dot(up_w, x, tl.zeros([ROWS, COLUMNS], tl.float32), PACK, FORMAT)
    for start in tl.range(BLOCK_K, PART_K, BLOCK_K, num_stages=NUM_STAGES):
        inside = start + offs < PART_K
        w = _load_weights(w_ptrs, scale_ptr, zero_ptr, rows, row_mask, start, at, inside, PACK, K, GROUP, FORMAT)
        x = _load_inputs(x_ptrs, start, (b < B)[:, None] & inside[None, :], PACK, FORMAT)
        y = _dot(w, x, y, PACK, FORMAT)
        if GATED:
            up_w = _load_weights(up_ptrs, scale_ptr, zero_ptr, N + rows, row_mask, start, at, inside, PACK, K, GROUP, FORMAT)
            up = _dot(up_w, x, up, PACK, FORMAT)
    if FORMAT != PLAIN and GROUP == 0:
        y *= tl.load(scale_ptr + rows, mask=row_mask, other=0.0).to(tl.float32)[:, None]
        if GATED:
            up *= tl.load(scale_ptr + N + rows, mask=row_mask, other=0.0).to(tl.float32)[:, None]
    if GATED:
        y = y * tl.sigmoid(y) * up
    places = (part * B + b)[None, :] * N + rows[:, None]
    mask = row_mask[:, None] & (b < B)[None, :]
    if ADD_STREAM:
        y += stream_scale * tl.load(stream_ptr + places, mask=mask, other=0.0)
    if ADD_PARTIAL:
        y += tl.load(partial_ptr + places, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + places, y.to(out_ptr.dtype.element_ty), mask=mask)
