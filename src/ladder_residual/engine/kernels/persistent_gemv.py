"""Absorb outputs + RMSNorm + projection, as in ``kernels_project.py``, by programs that walk over the rows.

``norm_walk``        programs that hold all of x, so that x is read once a program, and a block of rows ahead
``norm_walk_shared`` the same with several tiles in shared memory, requested while the input is still awaited

Whoever is launched early holds the line up from the end of its wait to its first product, so little stands between them: weights are
read in pairs, and the new stream is stored last (or behind the first block, if the second is under way by then), by pieces that are
read again: out of the registers that hold all of x it took a third of the kernel's instructions. No kernel that may run beside this
one writes what a piece is made of. While a sum is awaited (PDL 4) the card would run out of reading: part of the output product's
weights is asked for into the L2 cache, and the second block right behind the newest output, not behind the products of the first.
"""

from __future__ import annotations

from ._triton import tl, tl_cuda, triton
from .kernels_project import _absorb, _after_the_previous_kernel, _apart, _let_the_next_one_start, _pairs_times, _rows_of


@triton.jit
def _whole_rows(w_ptr, block, N, pairs, K: tl.constexpr, ROWS: tl.constexpr, GATED: tl.constexpr):
    """Block ``block`` of ROWS whole rows of the weights; zeros past the last."""
    rows, channel = _rows_of(block, N, ROWS, GATED)
    mask = (channel < N)[:, None]
    if pairs.shape[0] != K // 2:
        mask = mask & (pairs < K // 2)[None, :]
    return tl.load(
        w_ptr + rows.to(tl.int64)[:, None] * (K // 2) + pairs[None, :], mask=mask, other=0, eviction_policy="evict_first"
    )


@triton.jit
def _finish_block(
    w, even, odd, rms, block, N, out_ptr, TYPE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, PER: tl.constexpr,
    GATED: tl.constexpr,
):  # fmt: skip
    """A walker's block of rows times x, stored."""
    y = tl.sum(_pairs_times(w, even, odd, TYPE, ROWS, WIDTH), axis=1) * rms
    channel = block * PER + tl.arange(0, PER)
    if GATED:
        gate, up = tl.split(tl.reshape(y, [PER, 2]))
        y = gate * tl.sigmoid(gate) * up
    tl.store(out_ptr + channel, y.to(out_ptr.dtype.element_ty), mask=channel < N)


@triton.jit
def _store_piece(
    x_ptr, d0_ptr, d1_ptr, d2_ptr, x_out_ptr, own, K: tl.constexpr, PIECE: tl.constexpr, KEEP: tl.constexpr, DELTAS: tl.constexpr,
    CACHE: tl.constexpr,
):  # fmt: skip
    """A program's piece of the new stream."""
    mine = own * PIECE + tl.arange(0, PIECE)
    piece = _absorb(x_ptr, d0_ptr, d1_ptr, d2_ptr, mine, mine < K, KEEP, DELTAS, CACHE)
    tl.store(x_out_ptr + mine, piece, mask=mine < K)


@triton.jit
def _nothing(number, THREADS: tl.constexpr):
    """0, but only behind a barrier of the program and unknown to the compiler: what is added to it cannot be used before the loads that
    stand in front of it are under way. Left alone, the compiler puts a load behind the products that need not wait for it."""
    return (tl.max(tl.arange(0, THREADS) + number, axis=0) < 0).to(tl.int32)


@triton.jit
def _into_l2(ptr, BYTES: tl.constexpr):
    """Asks for BYTES from ``ptr`` on, by one thread and without waiting for them. Hopper and later."""
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
def norm_walk(
    x_ptr,  # as in norm_project
    d0_ptr,
    d1_ptr,
    d2_ptr,
    x_out_ptr,
    norm_ptr,
    w_ptr,
    out_ptr,  # (N)
    later_ptr,  # weights of a kernel to come, in pairs
    eps,
    N,
    FEW,  # blocks that every program walks over
    MANY,  # blocks that the first EARLY programs walk over
    EARLY,
    K: tl.constexpr,
    WIDTH: tl.constexpr,  # K rounded up to a power of two
    PIECE: tl.constexpr,  # of the new stream, that each program stores with STORES: a power of two
    ROWS: tl.constexpr,
    KEEP: tl.constexpr,
    DELTAS: tl.constexpr,
    STORES: tl.constexpr,
    GATED: tl.constexpr,
    SECOND: tl.constexpr,  # whether the second block is asked for before the first is multiplied; only PDL of 4 holds the compiler to it
    THREADS: tl.constexpr,  # of a program
    LATER: tl.constexpr,  # with PDL of 4: pairs of later_ptr that each program asks for into the L2 cache while it waits
    TURN: tl.constexpr,  # with PDL of 2 and more: the block of the walk after which the next kernel may start
    PDL: tl.constexpr,
):
    own, programs = tl.program_id(0), tl.num_programs(0)
    k = tl.arange(0, WIDTH)
    pairs = tl.arange(0, WIDTH // 2)
    w = _whole_rows(w_ptr, own, N, pairs, K, ROWS, GATED)
    g = tl.load(norm_ptr + k, mask=k < K, other=0.0)
    CACHE: tl.constexpr = ".cg" if PDL > 2 else ""
    if PDL == 4 and DELTAS > 0:
        x = _absorb(x_ptr, d0_ptr, d1_ptr, d2_ptr, k, k < K, KEEP, DELTAS - 1, CACHE)
        if LATER > 0:
            _into_l2(later_ptr + own * LATER, LATER * later_ptr.dtype.element_ty.primitive_bitwidth // 8)
        tl_cuda.gdc_wait()
        newest = d0_ptr if DELTAS == 1 else d1_ptr if DELTAS == 2 else d2_ptr
        output = tl.load(newest + k, mask=k < K, other=0.0, cache_modifier=CACHE)
        if SECOND:
            tl.debug_barrier()  # weights asked for before the output would hold it up
            second = _whole_rows(w_ptr, own + programs, N, pairs, K, ROWS, GATED)
            x = (x.to(tl.int32, bitcast=True) + _nothing(own, THREADS)).to(tl.float32, bitcast=True)
        x += output.to(tl.float32)
    else:
        if PDL == 1:
            tl_cuda.gdc_launch_dependents()
        if PDL > 0 and PDL != 3:
            tl_cuda.gdc_wait()
        x = _absorb(x_ptr, d0_ptr, d1_ptr, d2_ptr, k, k < K, KEEP, DELTAS, CACHE)
        if SECOND:
            second = _whole_rows(w_ptr, own + programs, N, pairs, K, ROWS, GATED)
    rms = tl.rsqrt(tl.sum(x * x, axis=0) / K + eps)
    even, odd = _apart(x * g.to(tl.float32), WIDTH)
    PER: tl.constexpr = ROWS // 2 if GATED else ROWS
    block, begin = own, 0
    if SECOND:
        _finish_block(w, even, odd, rms, own, N, out_ptr, norm_ptr.dtype.element_ty, ROWS, WIDTH, PER, GATED)
        w = second
        block, begin = own + programs, 1
        if PDL > 1 and TURN == 0:
            _let_the_next_one_start()
        if STORES:
            _store_piece(x_ptr, d0_ptr, d1_ptr, d2_ptr, x_out_ptr, own, K, PIECE, KEEP, DELTAS, CACHE)
    count = tl.where(own < EARLY, MANY, FEW)
    for at in range(begin, count):
        following = tl.where(at + 1 < count, block + tl.where(at < FEW, programs, EARLY), N)  # N: past the last
        ahead = _whole_rows(w_ptr, following, N, pairs, K, ROWS, GATED)
        _finish_block(w, even, odd, rms, block, N, out_ptr, norm_ptr.dtype.element_ty, ROWS, WIDTH, PER, GATED)
        w = ahead
        block = following
        if PDL > 1:  # noqa: SIM102  joined by "and", both would be asked at run time
            if at == TURN:
                _let_the_next_one_start()
    if STORES and not SECOND:
        _store_piece(x_ptr, d0_ptr, d1_ptr, d2_ptr, x_out_ptr, own, K, PIECE, KEEP, DELTAS, CACHE)
    if PDL > 1:  # a walk that was too short for it
        _let_the_next_one_start()


@triton.jit
def norm_walk_shared(
    x_ptr,  # as in norm_walk
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
    PIECE: tl.constexpr,
    ROWS: tl.constexpr,
    TILES: tl.constexpr,  # in shared memory
    KEEP: tl.constexpr,
    DELTAS: tl.constexpr,
    STORES: tl.constexpr,
    GATED: tl.constexpr,
    PDL: tl.constexpr,
):
    """The wait stands inside the loop because the compiler then copies the first TILES blocks into shared memory ahead of it. Every
    program must have a block (``walking`` sees to it), or it would neither wait nor store its piece of the stream."""
    own, programs = tl.program_id(0), tl.num_programs(0)
    k = tl.arange(0, WIDTH)
    pairs = tl.arange(0, WIDTH // 2)
    even = tl.zeros([WIDTH // 2], tl.float32)
    odd = tl.zeros([WIDTH // 2], tl.float32)
    rms = 0.0
    PER: tl.constexpr = ROWS // 2 if GATED else ROWS
    for block in tl.range(own, tl.cdiv(N, PER), programs, num_stages=TILES + 1):
        w = _whole_rows(w_ptr, block, N, pairs, K, ROWS, GATED)
        if block == own:
            g = tl.load(norm_ptr + k, mask=k < K, other=0.0)
            _after_the_previous_kernel(PDL)
            x = _absorb(x_ptr, d0_ptr, d1_ptr, d2_ptr, k, k < K, KEEP, DELTAS, "")
            if STORES:
                _store_piece(x_ptr, d0_ptr, d1_ptr, d2_ptr, x_out_ptr, own, K, PIECE, KEEP, DELTAS, "")
            rms = tl.rsqrt(tl.sum(x * x, axis=0) / K + eps)
            even, odd = _apart(x * g.to(tl.float32), WIDTH)
        _finish_block(w, even, odd, rms, block, N, out_ptr, norm_ptr.dtype.element_ty, ROWS, WIDTH, PER, GATED)
