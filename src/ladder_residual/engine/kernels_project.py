"""Matrix-vector kernels for one token: the weights stream through once, everything else rides along.

``norm_project``   absorb outputs + RMSNorm + projection (QKV in slices of K, gate/up with SiLU, head)
``output_project`` split-KV merge or plain input + projection (attention output, MLP down) + what desync and parallel add

The norm costs no pass of its own: y = (W . (g * x)) * rsqrt(mean(x^2) + eps), so the sum of squares is collected while the
weights stream. The first tile of weights is loaded *before* ``gdc_wait``: weights never change, so with programmatic dependent
launch it is already there when the previous kernel's output is. Nothing but weights may be read above the wait.
"""

from __future__ import annotations

from ._triton import tl, tl_cuda, triton


@triton.jit
def _absorb(x_ptr, d0_ptr, d1_ptr, d2_ptr, k, mask, KEEP: tl.constexpr, DELTAS: tl.constexpr):
    """The stream at positions ``k`` with up to three outputs added, in float32."""
    if KEEP:
        x = tl.load(x_ptr + k, mask=mask, other=0.0)
    else:
        x = tl.zeros(k.shape, tl.float32)
    if DELTAS > 0:
        x += tl.load(d0_ptr + k, mask=mask, other=0.0).to(tl.float32)
    if DELTAS > 1:
        x += tl.load(d1_ptr + k, mask=mask, other=0.0).to(tl.float32)
    if DELTAS > 2:
        x += tl.load(d2_ptr + k, mask=mask, other=0.0).to(tl.float32)
    return x


@triton.jit
def _sum_neighbours(products, ROWS: tl.constexpr, BLOCK_K: tl.constexpr):
    """Adds up the eight neighbours one thread holds after a 16-byte load: no exchange between threads, an eighth of the registers."""
    return tl.sum(tl.reshape(products, [ROWS, BLOCK_K // 8, 8]), axis=2)


@triton.jit
def norm_project(
    x_ptr,  # stream, float32 (K)
    d0_ptr,  # outputs to absorb (K), model dtype
    d1_ptr,
    d2_ptr,
    x_out_ptr,  # the stream after absorbing (K); another buffer than x_ptr, because all programs read x_ptr
    norm_ptr,  # norm weight (K)
    w_ptr,  # (N, K), or (2 * N, K) for gate over up
    out_ptr,  # SLICES > 1: float32 (SLICES, N), not yet normed; otherwise (N)
    squares_ptr,  # float32 (SLICES): sum of squares of each slice of x; only with SLICES > 1
    eps,
    N,
    K: tl.constexpr,
    ROWS: tl.constexpr,  # rows of W per program (gate and up count separately)
    BLOCK_K: tl.constexpr,
    SLICES: tl.constexpr,
    KEEP: tl.constexpr,
    DELTAS: tl.constexpr,
    GATED: tl.constexpr,
    PDL: tl.constexpr,
):
    row_block = tl.program_id(0)
    part = tl.program_id(1)
    SLICE: tl.constexpr = K // SLICES
    EVEN: tl.constexpr = SLICE % BLOCK_K == 0
    r = tl.arange(0, ROWS)
    if GATED:  # gate and up of the same channel are neighbours in the tile
        channel = row_block * (ROWS // 2) + r // 2
        rows = channel + (r % 2) * N
    else:
        channel = row_block * ROWS + r
        rows = channel
    row_mask = channel < N
    offs = tl.arange(0, BLOCK_K)
    w_ptrs = w_ptr + rows.to(tl.int64)[:, None] * K + (part * SLICE + offs)[None, :]
    if EVEN:
        w_mask = row_mask[:, None]
    else:
        w_mask = row_mask[:, None] & (offs < SLICE)[None, :]
    w = tl.load(w_ptrs, mask=w_mask, other=0.0, eviction_policy="evict_first")
    if PDL:
        tl_cuda.gdc_launch_dependents()
        tl_cuda.gdc_wait()
    acc = tl.zeros([ROWS, BLOCK_K // 8], tl.float32)
    squares = tl.zeros([BLOCK_K], tl.float32)
    for start in range(0, SLICE, BLOCK_K):
        # the next tile is on its way while this one is used
        if EVEN:
            next_mask = row_mask[:, None] & (start + BLOCK_K < SLICE)
        else:
            next_mask = row_mask[:, None] & (start + BLOCK_K + offs < SLICE)[None, :]
        if BLOCK_K < SLICE:
            w_next = tl.load(w_ptrs + start + BLOCK_K, mask=next_mask, other=0.0, eviction_policy="evict_first")
        else:
            w_next = w
        k = part * SLICE + start + offs
        k_mask = (start + offs) < SLICE
        x = _absorb(x_ptr, d0_ptr, d1_ptr, d2_ptr, k, k_mask, KEEP, DELTAS)
        if DELTAS > 0:
            if row_block == (start // BLOCK_K) % tl.num_programs(0):  # each piece of the new stream is stored once
                tl.store(x_out_ptr + k, x, mask=k_mask)
        g = tl.load(norm_ptr + k, mask=k_mask, other=0.0).to(tl.float32)
        acc += _sum_neighbours(w.to(tl.float32) * (x * g)[None, :], ROWS, BLOCK_K)
        squares += x * x
        w = w_next
    y = tl.sum(acc, axis=1)
    total = tl.sum(squares, axis=0)
    if SLICES > 1:
        tl.store(out_ptr + part * N + channel, y, mask=row_mask)
        if row_block == 0:
            tl.store(squares_ptr + part, total)
    else:
        y = y * tl.rsqrt(total / K + eps)
        if GATED:
            gate, up = tl.split(tl.reshape(y, [ROWS // 2, 2]))
            channel = row_block * (ROWS // 2) + tl.arange(0, ROWS // 2)
            y = gate * tl.sigmoid(gate) * up
            tl.store(out_ptr + channel, y.to(out_ptr.dtype.element_ty), mask=channel < N)
        else:
            tl.store(out_ptr + channel, y.to(out_ptr.dtype.element_ty), mask=row_mask)


@triton.jit
def _merge_splits(in_ptr, lse_ptr, head0, HEADS: tl.constexpr, DIM: tl.constexpr, SPLITS: tl.constexpr):
    """Softmax-weighted mean of the splits' outputs for ``HEADS`` heads from ``head0``: (HEADS * DIM) in float32."""
    heads = head0 + tl.arange(0, HEADS)
    dims = tl.arange(0, DIM)
    top = tl.load(lse_ptr + heads * SPLITS)
    for s in tl.static_range(1, SPLITS):
        top = tl.maximum(top, tl.load(lse_ptr + heads * SPLITS + s))
    total = tl.zeros([HEADS], tl.float32)
    mixed = tl.zeros([HEADS, DIM], tl.float32)
    for s in tl.static_range(SPLITS):
        share = tl.exp(tl.load(lse_ptr + heads * SPLITS + s) - top)  # an empty split has lse -inf and counts nothing
        part = tl.load(in_ptr + (heads * SPLITS + s)[:, None] * DIM + dims[None, :]).to(tl.float32)
        mixed += share[:, None] * part
        total += share
    return tl.reshape(mixed / total[:, None], [HEADS * DIM])


@triton.jit
def output_project(
    in_ptr,  # (K), or with SPLITS > 0 the splits of attention (heads, SPLITS, DIM)
    lse_ptr,  # float32 (heads, SPLITS)
    w_ptr,  # (N, K)
    stream_ptr,  # float32 (N), with ADD_STREAM
    other_ptr,  # (N), with ADD_OTHER
    out_ptr,  # (N): this rank's message
    stream_scale,
    N,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
    DIM: tl.constexpr,
    ADD_STREAM: tl.constexpr,
    ADD_OTHER: tl.constexpr,
    PDL: tl.constexpr,
):
    row_block = tl.program_id(0)
    EVEN: tl.constexpr = K % BLOCK_K == 0
    rows = row_block * ROWS + tl.arange(0, ROWS)
    row_mask = rows < N
    offs = tl.arange(0, BLOCK_K)
    w_ptrs = w_ptr + rows.to(tl.int64)[:, None] * K + offs[None, :]
    if EVEN:
        w_mask = row_mask[:, None]
    else:
        w_mask = row_mask[:, None] & (offs < K)[None, :]
    w = tl.load(w_ptrs, mask=w_mask, other=0.0, eviction_policy="evict_first")
    if PDL:
        tl_cuda.gdc_launch_dependents()
        tl_cuda.gdc_wait()
    acc = tl.zeros([ROWS, BLOCK_K // 8], tl.float32)
    for start in range(0, K, BLOCK_K):
        if EVEN:
            next_mask = row_mask[:, None] & (start + BLOCK_K < K)
        else:
            next_mask = row_mask[:, None] & (start + BLOCK_K + offs < K)[None, :]
        if BLOCK_K < K:
            w_next = tl.load(w_ptrs + start + BLOCK_K, mask=next_mask, other=0.0, eviction_policy="evict_first")
        else:
            w_next = w
        if SPLITS > 0:
            x = _merge_splits(in_ptr, lse_ptr, start // DIM, BLOCK_K // DIM, DIM, SPLITS)
        else:
            x = tl.load(in_ptr + start + offs, mask=start + offs < K, other=0.0).to(tl.float32)
        acc += _sum_neighbours(w.to(tl.float32) * x[None, :], ROWS, BLOCK_K)
        w = w_next
    y = tl.sum(acc, axis=1)
    if ADD_STREAM:
        y += stream_scale * tl.load(stream_ptr + rows, mask=row_mask, other=0.0)
    if ADD_OTHER:
        y += tl.load(other_ptr + rows, mask=row_mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + rows, y.to(out_ptr.dtype.element_ty), mask=row_mask)
