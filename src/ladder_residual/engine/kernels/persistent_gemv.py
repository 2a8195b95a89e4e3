"""Residual add + RMSNorm + projection for one token, as ``norm_gemv``, by persistent programs.

``persistent_norm_gemv``       each program holds all of x and loops over blocks of rows, with the next block loaded ahead
``persistent_norm_gemv_smem``  the same with several blocks in shared memory, loaded while the input is still awaited

What stands between the wait and the first multiplication delays everything behind it, so little does. Weights are packed in pairs. The
new stream is stored last (or after the first block, if the second is loaded by then), a part by each program, which reads its part
again: storing from the registers that hold all of x took a third of the kernel's instructions. No kernel that may run beside this one
writes what that part is made of. While an all-reduce is awaited (WAIT_BEFORE_NEWEST) the memory would idle: the kernel prefetches part
of the output projection's weights into L2, and loads the second block right after the newest output.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import cuda as tl_cuda

from .common import (
    OFF,
    TRIGGER_THEN_WAIT,
    WAIT_AFTER_COMPUTE,
    WAIT_BEFORE_NEWEST,
    WAIT_THEN_TRIGGER,
    load_stream,
    multiply_packed,
    split_even_odd,
    wait_for_previous_kernel,
    wait_then_trigger,
    weight_rows,
)


@triton.jit
def _load_rows(w_ptr, block, N, pairs, K: tl.constexpr, ROWS: tl.constexpr, GATED: tl.constexpr):
    """Block ``block`` of ROWS whole rows of the weights; zeros past the last."""
    rows, channel = weight_rows(block, N, ROWS, GATED)
    mask = (channel < N)[:, None]
    if pairs.shape[0] != K // 2:
        mask = mask & (pairs < K // 2)[None, :]
    return tl.load(
        w_ptr + rows.to(tl.int64)[:, None] * (K // 2) + pairs[None, :], mask=mask, other=0, eviction_policy="evict_first"
    )


@triton.jit
def _multiply_block(
    w, even, odd, rstd, block, N, out_ptr, TYPE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, CHANNELS: tl.constexpr,
    GATED: tl.constexpr,
):  # fmt: skip
    """A block of rows times x, stored."""
    y = tl.sum(multiply_packed(w, even, odd, TYPE, ROWS, WIDTH), axis=1) * rstd
    channel = block * CHANNELS + tl.arange(0, CHANNELS)
    if GATED:
        gate, up = tl.split(tl.reshape(y, [CHANNELS, 2]))
        y = gate * tl.sigmoid(gate) * up
    tl.store(out_ptr + channel, y.to(out_ptr.dtype.element_ty), mask=channel < N)


@triton.jit
def _store_stream(
    x_ptr, d0_ptr, d1_ptr, d2_ptr, x_out_ptr, pid,
    K: tl.constexpr, STORE_WIDTH: tl.constexpr, KEEP_STREAM: tl.constexpr, NUM_ADDS: tl.constexpr, CACHE: tl.constexpr,
):  # fmt: skip
    """A program's part of the new stream."""
    columns = pid * STORE_WIDTH + tl.arange(0, STORE_WIDTH)
    part = load_stream(x_ptr, d0_ptr, d1_ptr, d2_ptr, 0, columns, columns < K, KEEP_STREAM, NUM_ADDS, CACHE)
    tl.store(x_out_ptr + columns, part, mask=columns < K)


@triton.jit
def _opaque_zero(number, THREADS: tl.constexpr):
    """0, known only after a barrier and not to the compiler: a value it is added to cannot be used before the loads above it are
    issued. Without it the compiler moves those loads below the multiplications that do not need them."""
    return (tl.max(tl.arange(0, THREADS) + number, axis=0) < 0).to(tl.int32)


@triton.jit
def _prefetch_l2(ptr, BYTES: tl.constexpr):
    """Prefetches BYTES from ``ptr`` on, by one thread. Hopper and later."""
    tl.inline_asm_elementwise(
        """{
        .reg .pred first;
        .reg .u32 thread;
        mov.u32 thread, %tid.x;
        setp.eq.u32 first, thread, 0;
        @first cp.async.bulk.prefetch.L2.global [$1], $2;
        mov.u32 $0, 0;
        }""",
        "=r,l,r",
        [ptr.to(tl.int64), BYTES],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def persistent_norm_gemv(
    x_ptr,  # as in norm_gemv
    d0_ptr,
    d1_ptr,
    d2_ptr,
    x_out_ptr,
    norm_ptr,
    w_ptr,
    out_ptr,  # (N)
    l2_ptr,  # packed weights of a later kernel
    eps,
    N,
    num_blocks,  # of every program
    first_num_blocks,  # of the first ``num_first`` programs
    num_first,
    K: tl.constexpr,
    WIDTH: tl.constexpr,  # K rounded up to a power of two
    STORE_WIDTH: tl.constexpr,  # columns of the new stream that each program stores: a power of two
    ROWS: tl.constexpr,
    KEEP_STREAM: tl.constexpr,
    NUM_ADDS: tl.constexpr,
    STORE_STREAM: tl.constexpr,
    GATED: tl.constexpr,
    PREFETCH_SECOND: tl.constexpr,  # load the second block before the first is multiplied; enforced only in WAIT_BEFORE_NEWEST
    THREADS: tl.constexpr,  # per program
    L2_PREFETCH: tl.constexpr,  # packed weights of l2_ptr that each program prefetches in WAIT_BEFORE_NEWEST
    TRIGGER_AT: tl.constexpr,  # the block after which to trigger the next kernel, in modes that trigger after the wait
    PDL: tl.constexpr,
):
    pid, programs = tl.program_id(0), tl.num_programs(0)
    k = tl.arange(0, WIDTH)
    pairs = tl.arange(0, WIDTH // 2)
    w = _load_rows(w_ptr, pid, N, pairs, K, ROWS, GATED)
    g = tl.load(norm_ptr + k, mask=k < K, other=0.0)
    CACHE: tl.constexpr = ".cg" if PDL >= WAIT_AFTER_COMPUTE else ""
    if PDL == WAIT_BEFORE_NEWEST and NUM_ADDS > 0:
        x = load_stream(x_ptr, d0_ptr, d1_ptr, d2_ptr, 0, k, k < K, KEEP_STREAM, NUM_ADDS - 1, CACHE)
        if L2_PREFETCH > 0:
            _prefetch_l2(l2_ptr + pid * L2_PREFETCH, L2_PREFETCH * l2_ptr.dtype.element_ty.primitive_bitwidth // 8)
        tl_cuda.gdc_wait()
        newest = d0_ptr if NUM_ADDS == 1 else d1_ptr if NUM_ADDS == 2 else d2_ptr
        output = tl.load(newest + k, mask=k < K, other=0.0, cache_modifier=CACHE)
        if PREFETCH_SECOND:
            tl.debug_barrier()  # weights loaded before the output would delay it
            second = _load_rows(w_ptr, pid + programs, N, pairs, K, ROWS, GATED)
            x = (x.to(tl.int32, bitcast=True) + _opaque_zero(pid, THREADS)).to(tl.float32, bitcast=True)
        x += output.to(tl.float32)
    else:
        if PDL == TRIGGER_THEN_WAIT:
            tl_cuda.gdc_launch_dependents()
        if PDL != OFF and PDL != WAIT_AFTER_COMPUTE:
            tl_cuda.gdc_wait()
        x = load_stream(x_ptr, d0_ptr, d1_ptr, d2_ptr, 0, k, k < K, KEEP_STREAM, NUM_ADDS, CACHE)
        if PREFETCH_SECOND:
            second = _load_rows(w_ptr, pid + programs, N, pairs, K, ROWS, GATED)
    rstd = tl.rsqrt(tl.sum(x * x, axis=0) / K + eps)
    even, odd = split_even_odd(x * g.to(tl.float32), WIDTH)
    CHANNELS: tl.constexpr = ROWS // 2 if GATED else ROWS
    block, begin = pid, 0
    if PREFETCH_SECOND:
        _multiply_block(w, even, odd, rstd, pid, N, out_ptr, norm_ptr.dtype.element_ty, ROWS, WIDTH, CHANNELS, GATED)
        w = second
        block, begin = pid + programs, 1
        if PDL >= WAIT_THEN_TRIGGER and TRIGGER_AT == 0:
            wait_then_trigger()
        if STORE_STREAM:
            _store_stream(x_ptr, d0_ptr, d1_ptr, d2_ptr, x_out_ptr, pid, K, STORE_WIDTH, KEEP_STREAM, NUM_ADDS, CACHE)
    count = tl.where(pid < num_first, first_num_blocks, num_blocks)
    for at in range(begin, count):
        following = tl.where(at + 1 < count, block + tl.where(at < num_blocks, programs, num_first), N)  # N: past the last
        ahead = _load_rows(w_ptr, following, N, pairs, K, ROWS, GATED)
        _multiply_block(w, even, odd, rstd, block, N, out_ptr, norm_ptr.dtype.element_ty, ROWS, WIDTH, CHANNELS, GATED)
        w = ahead
        block = following
        if PDL >= WAIT_THEN_TRIGGER:  # noqa: SIM102  joined by "and", both would be evaluated at run time
            if at == TRIGGER_AT:
                wait_then_trigger()
    if STORE_STREAM and not PREFETCH_SECOND:
        _store_stream(x_ptr, d0_ptr, d1_ptr, d2_ptr, x_out_ptr, pid, K, STORE_WIDTH, KEEP_STREAM, NUM_ADDS, CACHE)
    if PDL >= WAIT_THEN_TRIGGER:  # for programs with too few blocks to reach TRIGGER_AT
        wait_then_trigger()


@triton.jit
def persistent_norm_gemv_smem(
    x_ptr,  # as in persistent_norm_gemv
    d0_ptr,
    d1_ptr,
    d2_ptr,
    x_out_ptr,
    norm_ptr,
    w_ptr,
    out_ptr,
    eps,
    N,
    K: tl.constexpr,
    WIDTH: tl.constexpr,
    STORE_WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    SMEM_TILES: tl.constexpr,  # blocks in shared memory
    KEEP_STREAM: tl.constexpr,
    NUM_ADDS: tl.constexpr,
    STORE_STREAM: tl.constexpr,
    GATED: tl.constexpr,
    PDL: tl.constexpr,
):
    """The wait is inside the loop because the compiler then copies the first SMEM_TILES blocks into shared memory ahead of it. Every
    program must have a block (``tiles.persistent_programs``), or it would neither wait nor store its part of the stream."""
    pid, programs = tl.program_id(0), tl.num_programs(0)
    k = tl.arange(0, WIDTH)
    pairs = tl.arange(0, WIDTH // 2)
    even = tl.zeros([WIDTH // 2], tl.float32)
    odd = tl.zeros([WIDTH // 2], tl.float32)
    rstd = 0.0
    CHANNELS: tl.constexpr = ROWS // 2 if GATED else ROWS
    for block in tl.range(pid, tl.cdiv(N, CHANNELS), programs, num_stages=SMEM_TILES + 1):
        w = _load_rows(w_ptr, block, N, pairs, K, ROWS, GATED)
        if block == pid:
            g = tl.load(norm_ptr + k, mask=k < K, other=0.0)
            wait_for_previous_kernel(PDL)
            x = load_stream(x_ptr, d0_ptr, d1_ptr, d2_ptr, 0, k, k < K, KEEP_STREAM, NUM_ADDS, "")
            if STORE_STREAM:
                _store_stream(x_ptr, d0_ptr, d1_ptr, d2_ptr, x_out_ptr, pid, K, STORE_WIDTH, KEEP_STREAM, NUM_ADDS, "")
            rstd = tl.rsqrt(tl.sum(x * x, axis=0) / K + eps)
            even, odd = split_even_odd(x * g.to(tl.float32), WIDTH)
        _multiply_block(w, even, odd, rstd, block, N, out_ptr, norm_ptr.dtype.element_ty, ROWS, WIDTH, CHANNELS, GATED)
