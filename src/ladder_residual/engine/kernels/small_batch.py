"""Matrix products for a few sequences (2 to 16): weights stream through the tensor cores once, what a module adds rides along.

A batch this small leaves a product bound by memory, as one token does, but its multiplications no longer fit beside the loads:
``tl.dot`` does them, with the weights' rows as its rows and the sequences padded to the 16 columns it needs. The first tile of
weights is requested before ``gdc_wait`` (``kernels_project.py`` says why that is allowed); the compiler pipelines the others.
"""

from __future__ import annotations

from ._triton import tl, triton
from .kernels_project import _after_the_previous_kernel

SEQUENCES = 16  # columns of a product: the least tl.dot takes


@triton.jit
def project_rows(
    in_ptr,  # (B, K)
    w_ptr,  # (N, K), or (2 * N, K) for gate over up
    stream_ptr,  # float32 (B, N), with ADD_STREAM
    other_ptr,  # (B, N), with ADD_OTHER
    out_ptr,  # (B, N); SLICES > 1: float32 (SLICES, B, N)
    stream_scale,
    B,
    N,
    K: tl.constexpr,
    ROWS: tl.constexpr,  # rows of W per program; as many again of up
    BLOCK_K: tl.constexpr,
    SLICES: tl.constexpr,  # K is cut where the rows alone are too few to fill the card
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
    GATED: tl.constexpr,
    ADD_STREAM: tl.constexpr,
    ADD_OTHER: tl.constexpr,
    PDL: tl.constexpr,
):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row_mask = rows < N
    part = tl.program_id(1)
    SLICE: tl.constexpr = K // SLICES
    offs = tl.arange(0, BLOCK_K)
    b = tl.arange(0, COLUMNS)
    w_ptrs = w_ptr + rows.to(tl.int64)[:, None] * K + (part * SLICE + offs)[None, :]
    up_ptrs = w_ptrs + N.to(tl.int64) * K
    x_ptrs = in_ptr + b[:, None] * K + (part * SLICE + offs)[None, :]
    first_mask = row_mask[:, None] & (offs < SLICE)[None, :]
    w = tl.load(w_ptrs, mask=first_mask, other=0.0, eviction_policy="evict_first")
    if GATED:
        up_w = tl.load(up_ptrs, mask=first_mask, other=0.0, eviction_policy="evict_first")
    _after_the_previous_kernel(PDL)
    x = tl.trans(tl.load(x_ptrs, mask=(b < B)[:, None] & (offs < SLICE)[None, :], other=0.0))
    y = tl.dot(w, x)
    if GATED:
        up = tl.dot(up_w, x)
    for start in tl.range(BLOCK_K, SLICE, BLOCK_K, num_stages=STAGES):
        inside = start + offs < SLICE
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
    if ADD_OTHER:
        y += tl.load(other_ptr + places, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + places, y.to(out_ptr.dtype.element_ty), mask=mask)
