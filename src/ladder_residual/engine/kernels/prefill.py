"""Prefill: rotary embedding and cache write for every token of the prompts."""

from __future__ import annotations

import triton
import triton.language as tl

from .common import dequantized, load_heads, store_token


@triton.jit
def rotate_and_store(
    qkv_ptr,  # (rows, width); columns: queries, keys, values
    bias_ptr,  # (width)
    q_norm_ptr,  # (DIM)
    k_norm_ptr,
    cos_ptr,  # float32 (max_context, DIM)
    sin_ptr,
    q_ptr,  # (rows, HEADS, DIM)
    k_cache_ptr,  # (B, KV_HEADS, max_context, DIM)
    v_cache_ptr,
    k_scale_ptr,  # (B, KV_HEADS, max_context) of an fp8 cache, else None; the prompt then attends to
    v_scale_ptr,
    k_ptr,  # (rows, KV_HEADS, DIM), what decode steps will read
    v_ptr,
    length,
    max_context,
    eps,
    HEADS: tl.constexpr,
    HEADS_PAD: tl.constexpr,
    KV_HEADS: tl.constexpr,
    KV_PAD: tl.constexpr,
    DIM: tl.constexpr,
    BIAS: tl.constexpr,
    HEAD_NORM: tl.constexpr,
):
    """One program per row (sequence and position)."""
    row = tl.program_id(0).to(tl.int64)
    sequence = row // length
    position = row % length
    width: tl.constexpr = (HEADS + 2 * KV_HEADS) * DIM
    dims = tl.arange(0, DIM)
    swapped = (dims + DIM // 2) % DIM
    cos = tl.load(cos_ptr + position * DIM + dims)[None, :]
    sin = (tl.load(sin_ptr + position * DIM + dims) * tl.where(dims < DIM // 2, -1.0, 1.0))[None, :]

    heads = tl.arange(0, HEADS_PAD)
    mask = heads < HEADS
    q = load_heads(qkv_ptr, qkv_ptr, bias_ptr, q_norm_ptr, row, width, heads * DIM, dims, mask, eps, 1,
                   1, True, BIAS, HEAD_NORM, DIM)  # fmt: skip
    q_swapped = load_heads(qkv_ptr, qkv_ptr, bias_ptr, q_norm_ptr, row, width, heads * DIM, swapped, mask, eps, 1,
                           1, True, BIAS, HEAD_NORM, DIM)  # fmt: skip
    place = q_ptr + (row * HEADS + heads)[:, None] * DIM + dims[None, :]
    tl.store(place, (q * cos + q_swapped * sin).to(q_ptr.dtype.element_ty), mask=mask[:, None])

    heads = tl.arange(0, KV_PAD)
    mask = heads < KV_HEADS
    first = (HEADS + heads) * DIM
    k = load_heads(qkv_ptr, qkv_ptr, bias_ptr, k_norm_ptr, row, width, first, dims, mask, eps, 1,
                   1, True, BIAS, HEAD_NORM, DIM)  # fmt: skip
    k_swapped = load_heads(qkv_ptr, qkv_ptr, bias_ptr, k_norm_ptr, row, width, first, swapped, mask, eps, 1,
                           1, True, BIAS, HEAD_NORM, DIM)  # fmt: skip
    v = load_heads(qkv_ptr, qkv_ptr, bias_ptr, k_norm_ptr, row, width, first + KV_HEADS * DIM, dims, mask, eps, 1,
                   1, True, BIAS, False, DIM)  # fmt: skip
    rows = (sequence * KV_HEADS + heads) * max_context + position
    k = store_token(k_cache_ptr, k_scale_ptr, k * cos + k_swapped * sin, rows, mask, dims, DIM)
    v = store_token(v_cache_ptr, v_scale_ptr, v, rows, mask, dims, DIM)
    if k_scale_ptr is not None:
        place = (row * KV_HEADS + heads)[:, None] * DIM + dims[None, :]
        tl.store(k_ptr + place, dequantized(k, k_ptr.dtype.element_ty), mask=mask[:, None])
        tl.store(v_ptr + place, dequantized(v, v_ptr.dtype.element_ty), mask=mask[:, None])
