"""Projections for a few sequences at once: the weights stream through tensor cores once, whatever the batch up to 16.

A program takes ROWS rows of W and all sequences; the loads of the next STAGES tiles are under way while one is multiplied. With
so few sequences a tile of W is used once per sequence only, so what counts is how many bytes are in flight, not arithmetic.
"""

from __future__ import annotations

from ._triton import tl, triton
from .kernels_project import _after_the_previous_kernel

MAX_BATCH = 16  # one tensor-core tile


@triton.jit
def _columns(w_ptr, rows, row_mask, k, K: tl.constexpr, EVEN: tl.constexpr):
    """A tile of W, transposed: (k, rows)."""
    mask = row_mask[None, :] if EVEN else row_mask[None, :] & (k < K)[:, None]
    return tl.load(w_ptr + rows.to(tl.int64)[None, :] * K + k[:, None], mask=mask, other=0.0, eviction_policy="evict_first")


@triton.jit
def batch_project(
    x_ptr,  # (B, K)
    w_ptr,  # (N, K), or (2 * N, K) for gate over up
    stream_ptr,  # float32 (B, N), with ADD_STREAM
    other_ptr,  # (B, N), with ADD_OTHER
    out_ptr,  # (B, N)
    stream_scale,
    B,
    N,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    BATCH: tl.constexpr,  # B padded to what a tensor core takes
    GATED: tl.constexpr,
    ADD_STREAM: tl.constexpr,
    ADD_OTHER: tl.constexpr,
    PDL: tl.constexpr,
):
    EVEN: tl.constexpr = K % BLOCK_K == 0
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row_mask = rows < N
    b = tl.arange(0, BATCH)
    offs = tl.arange(0, BLOCK_K)
    _after_the_previous_kernel(PDL)
    acc = tl.zeros([BATCH, ROWS], tl.float32)
    acc_up = tl.zeros([BATCH, ROWS], tl.float32)
    for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        k = start + offs
        mask = (b < B)[:, None] if EVEN else (b < B)[:, None] & (k < K)[None, :]
        x = tl.load(x_ptr + b[:, None] * K + k[None, :], mask=mask, other=0.0)
        acc = tl.dot(x, _columns(w_ptr, rows, row_mask, k, K, EVEN), acc)
        if GATED:
            acc_up = tl.dot(x, _columns(w_ptr, rows + N, row_mask, k, K, EVEN), acc_up)
    y = acc * tl.sigmoid(acc) * acc_up if GATED else acc
    at = b[:, None] * N + rows[None, :]
    mask = (b < B)[:, None] & row_mask[None, :]
    if ADD_STREAM:
        y += stream_scale * tl.load(stream_ptr + at, mask=mask, other=0.0)
    if ADD_OTHER:
        y += tl.load(other_ptr + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, y.to(out_ptr.dtype.element_ty), mask=mask)
