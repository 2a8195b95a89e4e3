"""Decode attention: rotary embedding, cache write and grouped-query attention over a split of the cache, in one kernel.

One program per (sequence, KV head, split). All query heads of the group share the K and V tiles. The new token's key and value
are not read back from the cache: the last split adds them in registers and writes them. Old cache entries were written by earlier
steps, so their first tile is loaded above ``gdc_wait`` and comes in while the QKV projection still runs.
"""

from __future__ import annotations

from ._triton import tl, tl_cuda, triton


@triton.jit
def _head_rows(
    qkv_ptr, squares_ptr, bias_ptr, norm_ptr, b, width, first, cols, row_mask, eps, hidden,
    SLICES: tl.constexpr, NORMED: tl.constexpr, BIAS: tl.constexpr, HEAD_NORM: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """Rows of heads starting at columns ``first`` of the projection's output, finished: summed over slices, scaled by the norm
    of the stream, bias added, head-normed. ``cols`` permutes the DIM columns (for the rotation)."""
    index = first[:, None] + cols[None, :]
    mask = row_mask[:, None]
    if SLICES > 1:  # partial sums over slices of the hidden size; with one sequence not yet divided by the stream's rms
        y = tl.zeros(index.shape, tl.float32)
        for s in tl.static_range(SLICES):
            y += tl.load(qkv_ptr + (s * tl.num_programs(0) + b) * width + index, mask=mask, other=0.0)
        if not NORMED:
            total = 0.0
            for s in tl.static_range(SLICES):
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
def decode_attention(
    qkv_ptr,  # SLICES > 1: float32 (SLICES, B, width), otherwise (B, width); columns: queries, keys, values
    squares_ptr,  # float32 (SLICES)
    bias_ptr,  # (width)
    q_norm_ptr,  # (DIM)
    k_norm_ptr,
    cos_ptr,  # float32 (max_context, DIM)
    sin_ptr,
    positions_ptr,  # int32 (B): where the new token goes
    k_cache_ptr,  # (B, KV_HEADS, max_context, DIM)
    v_cache_ptr,
    out_ptr,  # (B, KV_HEADS * GROUP, SPLITS, DIM)
    lse_ptr,  # float32 (B, KV_HEADS * GROUP, SPLITS)
    max_context,
    scale,
    eps,
    hidden,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,  # GROUP rounded up to what tl.dot takes
    DIM: tl.constexpr,
    BLOCK_T: tl.constexpr,
    SPLITS: tl.constexpr,
    SLICES: tl.constexpr,
    NORMED: tl.constexpr,  # False: slices of a stream that is still to be divided by its rms
    BIAS: tl.constexpr,
    HEAD_NORM: tl.constexpr,
    PDL: tl.constexpr,
):
    b = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    width: tl.constexpr = (KV_HEADS * GROUP + 2 * KV_HEADS) * DIM
    position = tl.load(positions_ptr + b)  # also the number of old tokens
    chunk = tl.cdiv(tl.cdiv(position, SPLITS), BLOCK_T) * BLOCK_T
    begin = split * chunk
    end = tl.minimum(begin + chunk, position)
    dims = tl.arange(0, DIM)
    tokens = tl.arange(0, BLOCK_T)
    cache_row = (b * KV_HEADS + kv_head).to(tl.int64) * max_context
    k_ptrs = k_cache_ptr + (cache_row + begin + tokens)[:, None] * DIM + dims[None, :]
    v_ptrs = v_cache_ptr + (cache_row + begin + tokens)[:, None] * DIM + dims[None, :]
    valid = begin + tokens < end
    k = tl.load(k_ptrs, mask=valid[:, None], other=0.0)
    v = tl.load(v_ptrs, mask=valid[:, None], other=0.0)
    half: tl.constexpr = DIM // 2
    swapped = (dims + half) % DIM
    cos = tl.load(cos_ptr + position * DIM + dims)
    sin = tl.load(sin_ptr + position * DIM + dims) * tl.where(dims < half, -1.0, 1.0)
    if PDL == 1:
        tl_cuda.gdc_launch_dependents()
    if PDL > 0:
        tl_cuda.gdc_wait()
    if PDL == 2:
        tl_cuda.gdc_launch_dependents()

    g = tl.arange(0, GROUP_PAD)
    head_mask = g < GROUP
    first = (kv_head * GROUP + g) * DIM
    q = _head_rows(qkv_ptr, squares_ptr, bias_ptr, q_norm_ptr, b, width, first, dims, head_mask, eps, hidden,
                   SLICES, NORMED, BIAS, HEAD_NORM, DIM)  # fmt: skip
    q_swapped = _head_rows(qkv_ptr, squares_ptr, bias_ptr, q_norm_ptr, b, width, first, swapped, head_mask, eps, hidden,
                           SLICES, NORMED, BIAS, HEAD_NORM, DIM)  # fmt: skip
    q = ((q * cos[None, :] + q_swapped * sin[None, :]) * scale).to(k.dtype)

    top = tl.full([GROUP_PAD], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_PAD], tl.float32)
    acc = tl.zeros([GROUP_PAD, DIM], tl.float32)
    for start in range(begin, end, BLOCK_T):
        ahead = start + BLOCK_T - begin
        valid_next = start + BLOCK_T + tokens < end
        k_next = tl.load(k_ptrs + ahead * DIM, mask=valid_next[:, None], other=0.0)
        v_next = tl.load(v_ptrs + ahead * DIM, mask=valid_next[:, None], other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")  # of float32; narrower ones are as they are
        scores = tl.where((start + tokens < end)[None, :], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, axis=1))
        p = tl.exp(scores - new_top[:, None])
        fade = tl.exp(top - new_top)
        acc = acc * fade[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
        total = total * fade + tl.sum(p, axis=1)
        top = new_top
        k = k_next
        v = v_next

    if split == SPLITS - 1:  # the new token itself: this split has the fewest old ones, often none
        one = tl.arange(0, 1)
        k_first = (KV_HEADS * GROUP + kv_head + one) * DIM
        v_first = (KV_HEADS * GROUP + KV_HEADS + kv_head + one) * DIM
        k_new = _head_rows(qkv_ptr, squares_ptr, bias_ptr, k_norm_ptr, b, width, k_first, dims, one < 1, eps, hidden,
                           SLICES, NORMED, BIAS, HEAD_NORM, DIM)  # fmt: skip
        k_swapped = _head_rows(qkv_ptr, squares_ptr, bias_ptr, k_norm_ptr, b, width, k_first, swapped, one < 1, eps, hidden,
                               SLICES, NORMED, BIAS, HEAD_NORM, DIM)  # fmt: skip
        v_new = _head_rows(qkv_ptr, squares_ptr, bias_ptr, k_norm_ptr, b, width, v_first, dims, one < 1, eps, hidden,
                           SLICES, NORMED, BIAS, False, DIM)  # fmt: skip
        k_new = (k_new * cos[None, :] + k_swapped * sin[None, :]).to(k_cache_ptr.dtype.element_ty)
        v_new = v_new.to(v_cache_ptr.dtype.element_ty)
        place = (cache_row + position + one)[:, None] * DIM + dims[None, :]
        tl.store(k_cache_ptr + place, k_new)
        tl.store(v_cache_ptr + place, v_new)
        score = tl.sum(q.to(tl.float32) * k_new.to(tl.float32), axis=1)
        new_top = tl.maximum(top, score)
        fade = tl.exp(top - new_top)
        p_new = tl.exp(score - new_top)
        acc = acc * fade[:, None] + p_new[:, None] * v_new.to(tl.float32)
        total = total * fade + p_new
        top = new_top

    out_row = (b * KV_HEADS * GROUP + kv_head * GROUP + g) * SPLITS + split
    # an empty split: total 0, top -inf; its output must be finite because the merge multiplies it by 0
    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    lse = tl.where(total > 0, top + tl.log(tl.where(total > 0, total, 1.0)), float("-inf"))
    tl.store(out_ptr + out_row[:, None] * DIM + dims[None, :], acc.to(out_ptr.dtype.element_ty), mask=head_mask[:, None])
    tl.store(lse_ptr + out_row, lse, mask=head_mask)


@triton.jit
def merge_splits(
    in_ptr, lse_ptr, out_ptr, SPLITS: tl.constexpr, SPLITS_PAD: tl.constexpr, DIM: tl.constexpr, PDL: tl.constexpr
):
    """(rows, SPLITS, DIM) -> (rows, DIM); one program per row (sequence and head)."""
    row = tl.program_id(0).to(tl.int64)
    if PDL == 1:
        tl_cuda.gdc_launch_dependents()
    if PDL > 0:
        tl_cuda.gdc_wait()
    if PDL == 2:
        tl_cuda.gdc_launch_dependents()
    s = tl.arange(0, SPLITS_PAD)
    dims = tl.arange(0, DIM)
    lse = tl.load(lse_ptr + row * SPLITS + s, mask=s < SPLITS, other=float("-inf"))
    share = tl.exp(lse - tl.max(lse, axis=0))
    parts = tl.load(in_ptr + (row * SPLITS + s)[:, None] * DIM + dims[None, :], mask=(s < SPLITS)[:, None], other=0.0)
    mixed = tl.sum(share[:, None] * parts.to(tl.float32), axis=0) / tl.sum(share, axis=0)
    tl.store(out_ptr + row * DIM + dims, mixed.to(out_ptr.dtype.element_ty))
