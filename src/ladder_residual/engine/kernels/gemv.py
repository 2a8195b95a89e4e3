"""GEMV kernels for one token: the weights stream through once, everything else is fused around them.

``norm_gemv``  residual add + RMSNorm + projection (QKV with split-K, gate/up with SiLU, LM head)
``gemv``       output and down projection + what desync and parallel add to the partial

The norm costs no pass of its own: y = (W . (g * x)) * rsqrt(mean(x^2) + eps), so the sum of squares is collected while the weights
stream. PREFETCH tiles of weights are loaded ahead of use, the first ones before the wait: weights never change, so with programmatic
dependent launch they arrive while the previous kernel still runs.

With PACK=2 two 16-bit weights are read as one int32 (two of float32 as one int64; ``tiles.packed``). The compiler keeps every element
of a tile that a loop carries along in a register of its own, so two bfloat16 take two registers; packed they take one.

BLOCK_K = 256 * warps makes each thread's eight weights of a row meet the eight elements of x that it loaded itself. Any other width
makes the compiler pass x through shared memory, with barriers, in every iteration. With quantised weights (``quantized.py``) x has the
order of their words, and it is 128 words * warps.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .common import load_stream, multiply_packed, split_even_odd, sum_within_thread, wait_for_previous_kernel, weight_rows
from .quantized import PLAIN, WORDS, columns, load_scales, load_words, multiply_numbers


@triton.jit
def _multiply(w, x, TYPE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, PACK: tl.constexpr, FORMAT: tl.constexpr):
    """A tile of weights, PACK of them in an element, times x: partial sums (ROWS, 16 bytes each)."""
    if FORMAT != PLAIN:
        return multiply_numbers(w, x, ROWS, WIDTH, PACK, FORMAT)
    elif PACK == 2:
        even, odd = split_even_odd(x, WIDTH)
        return multiply_packed(w, even, odd, TYPE, ROWS, WIDTH)
    else:
        return sum_within_thread(w.to(tl.float32) * x[None, :], ROWS, WIDTH, 8)


@triton.jit
def _load_weights(
    w_ptrs, scale_ptr, zero_ptr, rows, row_mask, words, first, start,
    K: tl.constexpr, PART_K: tl.constexpr, BLOCK_K: tl.constexpr, PACK: tl.constexpr, GROUP: tl.constexpr, FORMAT: tl.constexpr,
):  # fmt: skip
    """The tile of weights from element ``start`` of the rows' part on (its first column is ``first``); zeros past the part. Read once, so
    evicted first: x stays in L1. Of quantised weights the words, and their scales if they are of groups."""
    if PART_K % BLOCK_K == 0:
        mask = row_mask[:, None] & (start < PART_K // PACK)
    else:
        mask = row_mask[:, None] & (start + words < PART_K // PACK)[None, :]
    if FORMAT == PLAIN:
        return tl.load(w_ptrs + start, mask=mask, other=0, eviction_policy="evict_first")
    elif GROUP == 0:
        return (load_words(w_ptrs + start, mask),)
    else:
        at = first + start * PACK + tl.arange(0, words.shape[0] // WORDS) * (WORDS * PACK)
        return (load_words(w_ptrs + start, mask),) + load_scales(scale_ptr, zero_ptr, rows, row_mask, at, K, GROUP)


@triton.jit
def norm_gemv(
    x_ptr,  # residual stream, float32 (K)
    d0_ptr,  # module outputs to add to it (K), model dtype
    d1_ptr,
    d2_ptr,
    x_out_ptr,  # the new stream (K), with STORE_STREAM; another buffer than x_ptr, because all programs read x_ptr
    norm_ptr,  # norm weight (K)
    w_ptr,  # (N, K), or (2 * N, K) for gate over up; packed with PACK=2
    out_ptr,  # SPLIT_K > 1: float32 (SPLIT_K, N), not yet normed; otherwise (N)
    squares_ptr,  # float32 (SPLIT_K): sum of squares of each part of x, with SPLIT_K > 1
    scale_ptr,  # of quantised weights (rows, groups of K), else None
    zero_ptr,  # zero points, as the scales, or None
    eps,
    N,
    K: tl.constexpr,
    ROWS: tl.constexpr,  # rows of W per program (gate and up count separately)
    BLOCK_K: tl.constexpr,
    PREFETCH: tl.constexpr,  # tiles loaded ahead of use, 1 to 3
    SPLIT_K: tl.constexpr,
    KEEP_STREAM: tl.constexpr,
    NUM_ADDS: tl.constexpr,
    STORE_STREAM: tl.constexpr,
    GATED: tl.constexpr,
    PACK: tl.constexpr,  # weights in an element of w_ptr: 1 or 2, with quantised ones 4 or 8
    GROUP: tl.constexpr,  # columns of a quantised weight's scale; 0: a scale per row
    FORMAT: tl.constexpr,  # of quantised weights
    PDL: tl.constexpr,
):
    row_block = tl.program_id(0)
    part = tl.program_id(1)
    PART_K: tl.constexpr = K // SPLIT_K
    rows, channel = weight_rows(row_block, N, ROWS, GATED)
    row_mask = channel < N
    offs = columns(BLOCK_K, PACK, FORMAT)
    words = tl.arange(0, BLOCK_K // PACK)
    w_ptrs = w_ptr + rows.to(tl.int64)[:, None] * (K // PACK) + (part * (PART_K // PACK) + words)[None, :]
    w0 = _load_weights(
        w_ptrs, scale_ptr, zero_ptr, rows, row_mask, words, part * PART_K, 0, K, PART_K, BLOCK_K, PACK, GROUP, FORMAT
    )  # fmt: skip
    if PREFETCH > 1:
        w1 = _load_weights(
            w_ptrs, scale_ptr, zero_ptr, rows, row_mask, words, part * PART_K, BLOCK_K // PACK, K, PART_K, BLOCK_K, PACK, GROUP, FORMAT
        )  # fmt: skip
    if PREFETCH > 2:
        w2 = _load_weights(
            w_ptrs, scale_ptr, zero_ptr, rows, row_mask, words, part * PART_K, 2 * BLOCK_K // PACK, K, PART_K, BLOCK_K, PACK, GROUP, FORMAT
        )  # fmt: skip
    wait_for_previous_kernel(PDL)
    k = part * PART_K + offs
    x = load_stream(x_ptr, d0_ptr, d1_ptr, d2_ptr, 0, k, offs < PART_K, KEEP_STREAM, NUM_ADDS, "")
    g = tl.load(norm_ptr + k, mask=offs < PART_K, other=0.0)
    acc = tl.zeros([ROWS, BLOCK_K // (8 if FORMAT == PLAIN else WORDS * PACK)], tl.float32)
    squares = tl.zeros(offs.shape, tl.float32)
    for start in range(0, PART_K, BLOCK_K):
        ahead = _load_weights(
            w_ptrs, scale_ptr, zero_ptr, rows, row_mask, words, part * PART_K, (start + PREFETCH * BLOCK_K) // PACK,
            K, PART_K, BLOCK_K, PACK, GROUP, FORMAT,
        )  # fmt: skip
        following = start + BLOCK_K + offs
        k_next = part * PART_K + following
        x_next = load_stream(x_ptr, d0_ptr, d1_ptr, d2_ptr, 0, k_next, following < PART_K, KEEP_STREAM, NUM_ADDS, "")
        g_next = tl.load(norm_ptr + k_next, mask=following < PART_K, other=0.0)
        if STORE_STREAM and row_block == (start // BLOCK_K) % tl.num_programs(0):  # each part of the new stream is stored once
            tl.store(x_out_ptr + k, x, mask=start + offs < PART_K)
        acc += _multiply(w0, x * g.to(tl.float32), norm_ptr.dtype.element_ty, ROWS, BLOCK_K, PACK, FORMAT)
        squares += x * x
        k = k_next
        x = x_next
        g = g_next
        if PREFETCH == 1:
            w0 = ahead
        elif PREFETCH == 2:
            w0 = w1
            w1 = ahead
        else:
            w0 = w1
            w1 = w2
            w2 = ahead
    y = tl.sum(acc, axis=1)
    total = tl.sum(squares)
    if FORMAT != PLAIN and GROUP == 0:
        y *= tl.load(scale_ptr + rows, mask=row_mask, other=0.0).to(tl.float32)
    if SPLIT_K > 1:
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
def gemv(
    in_ptr,  # (K)
    w_ptr,  # (N, K), packed with PACK=2
    stream_ptr,  # float32 (N), with ADD_STREAM
    partial_ptr,  # (N), with ADD_PARTIAL
    out_ptr,  # (N): this rank's partial
    scale_ptr,  # as in norm_gemv
    zero_ptr,
    stream_scale,
    N,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PREFETCH: tl.constexpr,
    ADD_STREAM: tl.constexpr,
    ADD_PARTIAL: tl.constexpr,
    PACK: tl.constexpr,  # as in norm_gemv
    GROUP: tl.constexpr,
    FORMAT: tl.constexpr,
    PDL: tl.constexpr,
):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row_mask = rows < N
    offs = columns(BLOCK_K, PACK, FORMAT)
    words = tl.arange(0, BLOCK_K // PACK)
    w_ptrs = w_ptr + rows.to(tl.int64)[:, None] * (K // PACK) + words[None, :]
    w0 = _load_weights(
        w_ptrs, scale_ptr, zero_ptr, rows, row_mask, words, 0, 0, K, K, BLOCK_K, PACK, GROUP, FORMAT
    )  # fmt: skip
    if PREFETCH > 1:
        w1 = _load_weights(
            w_ptrs, scale_ptr, zero_ptr, rows, row_mask, words, 0, BLOCK_K // PACK, K, K, BLOCK_K, PACK, GROUP, FORMAT
        )  # fmt: skip
    if PREFETCH > 2:
        w2 = _load_weights(
            w_ptrs, scale_ptr, zero_ptr, rows, row_mask, words, 0, 2 * BLOCK_K // PACK, K, K, BLOCK_K, PACK, GROUP, FORMAT
        )  # fmt: skip
    wait_for_previous_kernel(PDL)
    x = tl.load(in_ptr + offs, mask=offs < K, other=0.0)
    acc = tl.zeros([ROWS, BLOCK_K // (8 if FORMAT == PLAIN else WORDS * PACK)], tl.float32)
    for start in range(0, K, BLOCK_K):
        ahead = _load_weights(
            w_ptrs, scale_ptr, zero_ptr, rows, row_mask, words, 0, (start + PREFETCH * BLOCK_K) // PACK, K, K, BLOCK_K, PACK, GROUP, FORMAT
        )  # fmt: skip
        following = start + BLOCK_K + offs
        x_next = tl.load(in_ptr + following, mask=following < K, other=0.0)
        acc += _multiply(w0, x.to(tl.float32), in_ptr.dtype.element_ty, ROWS, BLOCK_K, PACK, FORMAT)
        x = x_next
        if PREFETCH == 1:
            w0 = ahead
        elif PREFETCH == 2:
            w0 = w1
            w1 = ahead
        else:
            w0 = w1
            w1 = w2
            w2 = ahead
    y = tl.sum(acc, axis=1)
    if FORMAT != PLAIN and GROUP == 0:
        y *= tl.load(scale_ptr + rows, mask=row_mask, other=0.0).to(tl.float32)
    if ADD_STREAM:
        y += stream_scale * tl.load(stream_ptr + rows, mask=row_mask, other=0.0)
    if ADD_PARTIAL:
        y += tl.load(partial_ptr + rows, mask=row_mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + rows, y.to(out_ptr.dtype.element_ty), mask=row_mask)
