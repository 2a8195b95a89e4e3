"""Decode attention: rotary embedding, cache write and grouped-query attention over a split of the cache, in one kernel.

One program per (sequence, KV head, split). All query heads of the group share the K and V tiles. The new token's key and value
are not read back from the cache: the last split adds them from registers and writes them. Old cache entries were written by earlier
steps, so their first tile is loaded before the wait, while the QKV projection still runs.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .common import dequantized, load_heads, store_token, wait_for_previous_kernel


@triton.jit
def _load_tokens(ptrs, scale_ptr, rows, valid):
    """Keys or values in a tuple; of an fp8 cache with the scale of each row."""
    held = tl.load(ptrs, mask=valid[:, None], other=0.0)
    if scale_ptr is None:
        return (held,)
    else:
        return held, tl.load(scale_ptr + rows, mask=valid, other=0.0)


@triton.jit
def decode_attention(
    qkv_ptr,  # SPLIT_K > 1: float32 (SPLIT_K, B, width), otherwise (B, width); columns: queries, keys, values
    squares_ptr,  # float32 (SPLIT_K)
    bias_ptr,  # (width)
    q_norm_ptr,  # (DIM)
    k_norm_ptr,
    cos_ptr,  # float32 (max_context, DIM)
    sin_ptr,
    positions_ptr,  # int32 (B): where the new token goes
    k_cache_ptr,  # (B, KV_HEADS, max_context, DIM)
    v_cache_ptr,
    k_scale_ptr,  # (B, KV_HEADS, max_context) of an fp8 cache, else None
    v_scale_ptr,
    out_ptr,  # (B, KV_HEADS * GROUP, KV_SPLITS, DIM)
    lse_ptr,  # float32 (B, KV_HEADS * GROUP, KV_SPLITS)
    max_context,
    scale,
    eps,
    hidden,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,  # GROUP rounded up to what tl.dot takes
    DIM: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    KV_SPLITS: tl.constexpr,
    SPLIT_K: tl.constexpr,
    NORMED: tl.constexpr,  # False: the split-K parts still have to be divided by the stream's rms
    BIAS: tl.constexpr,
    HEAD_NORM: tl.constexpr,
    PDL: tl.constexpr,
):
    b = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    width: tl.constexpr = (KV_HEADS * GROUP + 2 * KV_HEADS) * DIM
    position = tl.load(positions_ptr + b)  # also the number of old tokens
    chunk = tl.cdiv(tl.cdiv(position, KV_SPLITS), BLOCK_KV) * BLOCK_KV
    begin = split * chunk
    end = tl.minimum(begin + chunk, position)
    dims = tl.arange(0, DIM)
    tokens = tl.arange(0, BLOCK_KV)
    # of what is multiplied: E4M3 becomes float16 in one instruction, for two numbers; bfloat16 would take six, two of them slow
    as_stored: tl.constexpr = k_scale_ptr is None or out_ptr.dtype.element_ty == tl.float32
    TYPE: tl.constexpr = out_ptr.dtype.element_ty if as_stored else tl.float16
    cache_row = (b * KV_HEADS + kv_head).to(tl.int64) * max_context
    rows = cache_row + begin + tokens
    k_ptrs = k_cache_ptr + rows[:, None] * DIM + dims[None, :]
    v_ptrs = v_cache_ptr + rows[:, None] * DIM + dims[None, :]
    valid = begin + tokens < end
    k = _load_tokens(k_ptrs, k_scale_ptr, rows, valid)
    v = _load_tokens(v_ptrs, v_scale_ptr, rows, valid)
    half: tl.constexpr = DIM // 2
    swapped = (dims + half) % DIM
    cos = tl.load(cos_ptr + position * DIM + dims)
    sin = tl.load(sin_ptr + position * DIM + dims) * tl.where(dims < half, -1.0, 1.0)
    wait_for_previous_kernel(PDL)

    g = tl.arange(0, GROUP_PAD)
    head_mask = g < GROUP
    first = (kv_head * GROUP + g) * DIM
    q = load_heads(qkv_ptr, squares_ptr, bias_ptr, q_norm_ptr, b, width, first, dims, head_mask, eps, hidden,
                   SPLIT_K, NORMED, BIAS, HEAD_NORM, DIM)  # fmt: skip
    q_swapped = load_heads(qkv_ptr, squares_ptr, bias_ptr, q_norm_ptr, b, width, first, swapped, head_mask, eps, hidden,
                           SPLIT_K, NORMED, BIAS, HEAD_NORM, DIM)  # fmt: skip
    q = ((q * cos[None, :] + q_swapped * sin[None, :]) * scale).to(TYPE)

    row_max = tl.full([GROUP_PAD], float("-inf"), tl.float32)
    row_sum = tl.zeros([GROUP_PAD], tl.float32)
    acc = tl.zeros([GROUP_PAD, DIM], tl.float32)
    for start in range(begin, end, BLOCK_KV):
        ahead = start + BLOCK_KV - begin
        valid_next = start + BLOCK_KV + tokens < end
        k_next = _load_tokens(k_ptrs + ahead * DIM, k_scale_ptr, rows + ahead, valid_next)
        v_next = _load_tokens(v_ptrs + ahead * DIM, v_scale_ptr, rows + ahead, valid_next)
        # ieee: of float32; narrower ones are as they are
        scores = tl.dot(q, tl.trans(dequantized(k, q.dtype)), input_precision="ieee")
        scores = tl.where((start + tokens < end)[None, :], scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, axis=1))
        p = tl.exp(scores - new_max[:, None])
        alpha = tl.exp(row_max - new_max)
        acc = acc * alpha[:, None] + tl.dot(p.to(q.dtype), dequantized(v, q.dtype), input_precision="ieee")
        row_sum = row_sum * alpha + tl.sum(p, axis=1)
        row_max = new_max
        k = k_next
        v = v_next

    if split == KV_SPLITS - 1:  # the new token itself: this split has the fewest old ones, often none
        one = tl.arange(0, 1)
        k_first = (KV_HEADS * GROUP + kv_head + one) * DIM
        v_first = (KV_HEADS * GROUP + KV_HEADS + kv_head + one) * DIM
        k_new = load_heads(qkv_ptr, squares_ptr, bias_ptr, k_norm_ptr, b, width, k_first, dims, one < 1, eps, hidden,
                           SPLIT_K, NORMED, BIAS, HEAD_NORM, DIM)  # fmt: skip
        k_swapped = load_heads(qkv_ptr, squares_ptr, bias_ptr, k_norm_ptr, b, width, k_first, swapped, one < 1, eps, hidden,
                               SPLIT_K, NORMED, BIAS, HEAD_NORM, DIM)  # fmt: skip
        v_new = load_heads(qkv_ptr, squares_ptr, bias_ptr, k_norm_ptr, b, width, v_first, dims, one < 1, eps, hidden,
                           SPLIT_K, NORMED, BIAS, False, DIM)  # fmt: skip
        k_new = k_new * cos[None, :] + k_swapped * sin[None, :]
        k_new = store_token(k_cache_ptr, k_scale_ptr, k_new, cache_row + position + one, one < 1, dims, DIM)
        v_new = store_token(v_cache_ptr, v_scale_ptr, v_new, cache_row + position + one, one < 1, dims, DIM)
        score = tl.sum(q.to(tl.float32) * dequantized(k_new, tl.float32), axis=1)
        new_max = tl.maximum(row_max, score)
        alpha = tl.exp(row_max - new_max)
        p_new = tl.exp(score - new_max)
        acc = acc * alpha[:, None] + p_new[:, None] * dequantized(v_new, tl.float32)
        row_sum = row_sum * alpha + p_new
        row_max = new_max

    out_row = (b * KV_HEADS * GROUP + kv_head * GROUP + g) * KV_SPLITS + split
    # an empty split: row_sum 0, row_max -inf; its output must be finite because the merge multiplies it by 0
    acc = acc / tl.where(row_sum > 0, row_sum, 1.0)[:, None]
    lse = tl.where(row_sum > 0, row_max + tl.log(tl.where(row_sum > 0, row_sum, 1.0)), float("-inf"))
    tl.store(out_ptr + out_row[:, None] * DIM + dims[None, :], acc.to(out_ptr.dtype.element_ty), mask=head_mask[:, None])
    tl.store(lse_ptr + out_row, lse, mask=head_mask)


@triton.jit
def merge_splits(
    in_ptr, lse_ptr, out_ptr, KV_SPLITS: tl.constexpr, KV_SPLITS_PAD: tl.constexpr, DIM: tl.constexpr, PDL: tl.constexpr
):
    """(rows, KV_SPLITS, DIM) -> (rows, DIM); one program per row (sequence and head)."""
    row = tl.program_id(0).to(tl.int64)
    wait_for_previous_kernel(PDL)
    s = tl.arange(0, KV_SPLITS_PAD)
    dims = tl.arange(0, DIM)
    lse = tl.load(lse_ptr + row * KV_SPLITS + s, mask=s < KV_SPLITS, other=float("-inf"))
    share = tl.exp(lse - tl.max(lse, axis=0))
    parts = tl.load(in_ptr + (row * KV_SPLITS + s)[:, None] * DIM + dims[None, :], mask=(s < KV_SPLITS)[:, None], other=0.0)
    mixed = tl.sum(share[:, None] * parts.to(tl.float32), axis=0) / tl.sum(share, axis=0)
    tl.store(out_ptr + row * DIM + dims, mixed.to(out_ptr.dtype.element_ty))
