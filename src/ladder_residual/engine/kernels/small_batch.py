"""GEMM for a few sequences (2 to 16): the weights stream through the tensor cores once, everything else is fused around them.

A batch this small is still bound by memory, but its multiplications no longer hide behind the loads on the CUDA cores: ``tl.dot`` does
them, with the weights' rows as its rows and the sequences padded to the 16 columns it needs. The first tile of weights is loaded
before the wait; the compiler pipelines the others.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .common import wait_for_previous_kernel

MIN_COLUMNS = 16  # the least tl.dot takes


@triton.jit
def small_batch_gemm(
    in_ptr,  # (B, K)
    w_ptr,  # (N, K), or (2 * N, K) for gate over up
    stream_ptr,  # float32 (B, N), with ADD_STREAM
    partial_ptr,  # (B, N), with ADD_PARTIAL
    out_ptr,  # (B, N); SPLIT_K > 1: float32 (SPLIT_K, B, N)
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
    PDL: tl.constexpr,
):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row_mask = rows < N
    part = tl.program_id(1)
    PART_K: tl.constexpr = K // SPLIT_K
    offs = tl.arange(0, BLOCK_K)
    b = tl.arange(0, COLUMNS)
    w_ptrs = w_ptr + rows.to(tl.int64)[:, None] * K + (part * PART_K + offs)[None, :]
    up_ptrs = w_ptrs + N.to(tl.int64) * K
    x_ptrs = in_ptr + b[:, None] * K + (part * PART_K + offs)[None, :]
    first_mask = row_mask[:, None] & (offs < PART_K)[None, :]
    w = tl.load(w_ptrs, mask=first_mask, other=0.0, eviction_policy="evict_first")
    if GATED:
        up_w = tl.load(up_ptrs, mask=first_mask, other=0.0, eviction_policy="evict_first")
    wait_for_previous_kernel(PDL)
    x = tl.trans(tl.load(x_ptrs, mask=(b < B)[:, None] & (offs < PART_K)[None, :], other=0.0))
    y = tl.dot(w, x)
    if GATED:
        up = tl.dot(up_w, x)
    for start in tl.range(BLOCK_K, PART_K, BLOCK_K, num_stages=NUM_STAGES):
        inside = start + offs < PART_K
        mask = row_mask[:, None] & inside[None, :]
        w = tl.load(w_ptrs + start, mask=mask, other=0.0, eviction_policy="evict_first")
        x = tl.trans(tl.load(x_ptrs + start, mask=(b < B)[:, None] & inside[None, :], other=0.0))
        y = tl.dot(w, x, y)
        if GATED:
            up_w = tl.load(up_ptrs + start, mask=mask, other=0.0, eviction_policy="evict_first")
            up = tl.dot(up_w, x, up)
    if GATED:
        y = y * tl.sigmoid(y) * up
    places = (part * B + b)[None, :] * N + rows[:, None]
    mask = row_mask[:, None] & (b < B)[None, :]
    if ADD_STREAM:
        y += stream_scale * tl.load(stream_ptr + places, mask=mask, other=0.0)
    if ADD_PARTIAL:
        y += tl.load(partial_ptr + places, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + places, y.to(out_ptr.dtype.element_ty), mask=mask)
