"""Matrix-vector kernels for one token: the weights stream through once, everything else rides along.

``norm_project``   absorb outputs + RMSNorm + projection (QKV in slices of K, gate/up with SiLU, head); ``kernels_walk.py`` has another way
``output_project`` projection of attention's or the MLP's inner vector + what desync and parallel add to the message

The norm costs no pass of its own: y = (W . (g * x)) * rsqrt(mean(x^2) + eps), so the sum of squares is collected while the
weights stream. DEPTH tiles of weights are requested ahead of use; the first ones *before* ``gdc_wait``: weights never change, so
with programmatic dependent launch they are already there when the previous kernel's output is. Nothing but weights may be read
above the wait, unless the kernel is told that what it reads is older (PDL 3 and 4):

    0  ordinary launches
    1  the next kernel may start now, this one waits for the one before it
    2  waits, and then lets the next one start
    3  reads all of its input, computes, and only then waits and lets the next one start
    4  reads all but the last output it absorbs, waits, and reads that

Behind a kernel of 2 to 4 the one before *that* is complete: it was waited for before the next was let in. So a kernel of 3 or 4 may
read what was made two kernels ago (what it joins from other streams, and what changes if down's sum is launched early:
``graph_edges.py``). PTX promises to show what was made only to the kernel that waits; that it is then in L2 for all is an assumption,
and the loads of 3 and 4 go there, past L1.

Weights may come in pairs: two of a 16-bit type in one int32 (two of float32 in one int64), as ``gemv_ops.paired`` views them. The
compiler keeps every element of a tile that a loop carries along in a register of its own, so two bfloat16 take two registers, and
instructions to part them; as a pair they take one. Walkers always read pairs; for the others it is a matter of the tile.

BLOCK_K = 256 * warps is not a whim: then each thread's eight weights of a row meet the eight elements of x it loaded itself.
Any other width makes the compiler pass x through shared memory, with barriers, in every iteration.
"""

from __future__ import annotations

from ._triton import tl, tl_cuda, triton


@triton.jit
def _absorb(
    x_ptr, d0_ptr, d1_ptr, d2_ptr, k, mask, KEEP: tl.constexpr, DELTAS: tl.constexpr, CACHE: tl.constexpr
):  # fmt: skip
    """The stream at positions ``k`` with up to three outputs added, in float32."""
    if KEEP:
        x = tl.load(x_ptr + k, mask=mask, other=0.0, cache_modifier=CACHE)
    else:
        x = tl.zeros(k.shape, tl.float32)
    if DELTAS > 0:
        x += tl.load(d0_ptr + k, mask=mask, other=0.0, cache_modifier=CACHE).to(tl.float32)
    if DELTAS > 1:
        x += tl.load(d1_ptr + k, mask=mask, other=0.0, cache_modifier=CACHE).to(tl.float32)
    if DELTAS > 2:
        x += tl.load(d2_ptr + k, mask=mask, other=0.0, cache_modifier=CACHE).to(tl.float32)
    return x


@triton.jit
def _sum_neighbours(products, ROWS: tl.constexpr, WIDTH: tl.constexpr, HELD: tl.constexpr):
    """Adds up what one thread holds of a row: no exchange between threads, an eighth the registers."""
    return tl.sum(tl.reshape(products, [ROWS, WIDTH // HELD, HELD]), axis=2)


@triton.jit
def _apart(x, WIDTH: tl.constexpr):
    """Elements with even and with odd numbers."""
    return tl.split(tl.reshape(x, [WIDTH // 2, 2]))


@triton.jit
def _pairs_times(w, even, odd, TYPE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Pairs of weights (ROWS, WIDTH // 2) times x, whose elements come apart: (ROWS, WIDTH // 8). TYPE of one weight, which must be
    the type of the norm's weights or of the input beside it."""
    tl.static_assert(w.dtype.primitive_bitwidth == 2 * TYPE.primitive_bitwidth, "a pair is twice as wide as what it holds")
    if tl.bfloat16 == TYPE:  # the upper half of a float32
        first = (w << 16).to(tl.float32, bitcast=True)
        second = (w & -65536).to(tl.float32, bitcast=True)
    elif tl.float16 == TYPE:
        first = w.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        second = (w >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        first = w.to(tl.int32).to(tl.float32, bitcast=True)
        second = (w >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    return _sum_neighbours(first * even[None, :] + second * odd[None, :], ROWS, WIDTH // 2, 4)


@triton.jit
def _times(w, x, TYPE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, WORD: tl.constexpr):
    """A tile of weights, WORD of them in an element, times x: (ROWS, WIDTH // 8)."""
    if WORD == 2:
        even, odd = _apart(x, WIDTH)
        return _pairs_times(w, even, odd, TYPE, ROWS, WIDTH)
    else:
        return _sum_neighbours(w.to(tl.float32) * x[None, :], ROWS, WIDTH, 8)


@triton.jit
def _weights(w_ptrs, row_mask, words, start, size, EVEN: tl.constexpr):
    """The tile of weights from word ``start`` of the rows on; zeros past ``size``. Read once: they must not push x out of L1."""
    if EVEN:
        mask = row_mask[:, None] & (start < size)
    else:
        mask = row_mask[:, None] & (start + words < size)[None, :]
    return tl.load(w_ptrs + start, mask=mask, other=0, eviction_policy="evict_first")


@triton.jit
def _rows_of(block, N, ROWS: tl.constexpr, GATED: tl.constexpr):
    """The rows of W in a block of ROWS, and the output each belongs to: gate and up of the same channel are neighbours."""
    r = tl.arange(0, ROWS)
    if GATED:
        channel = block * (ROWS // 2) + r // 2
        return channel + (r % 2) * N, channel
    else:
        return block * ROWS + r, block * ROWS + r


@triton.jit
def _after_the_previous_kernel(PDL: tl.constexpr):
    """Below this line the previous kernel's output is there."""
    if PDL == 1:
        tl_cuda.gdc_launch_dependents()
    if PDL > 0:
        tl_cuda.gdc_wait()
    if PDL == 2:
        tl_cuda.gdc_launch_dependents()


@triton.jit
def _let_the_next_one_start():
    """Not before all before this kernel is complete: the next one may rely on it. Doing it again changes nothing."""
    tl_cuda.gdc_wait()
    tl_cuda.gdc_launch_dependents()


@triton.jit
def norm_project(
    x_ptr,  # stream, float32 (K)
    d0_ptr,  # outputs to absorb (K), model dtype
    d1_ptr,
    d2_ptr,
    x_out_ptr,  # with STORES, the stream after absorbing (K); another buffer than x_ptr, because all programs read x_ptr
    norm_ptr,  # norm weight (K)
    w_ptr,  # (N, K), or (2 * N, K) for gate over up; or in pairs
    out_ptr,  # SLICES > 1: float32 (SLICES, N), not yet normed; otherwise (N)
    squares_ptr,  # float32 (SLICES): sum of squares of each slice of x; only with SLICES > 1
    eps,
    N,
    K: tl.constexpr,
    ROWS: tl.constexpr,  # rows of W per program (gate and up count separately)
    BLOCK_K: tl.constexpr,
    DEPTH: tl.constexpr,  # tiles requested ahead, 1 to 3
    SLICES: tl.constexpr,
    KEEP: tl.constexpr,
    DELTAS: tl.constexpr,
    STORES: tl.constexpr,
    GATED: tl.constexpr,
    WORD: tl.constexpr,  # weights in an element of w_ptr: 1, or 2
    PDL: tl.constexpr,
):
    row_block = tl.program_id(0)
    part = tl.program_id(1)
    SLICE: tl.constexpr = K // SLICES
    EVEN: tl.constexpr = SLICE % BLOCK_K == 0
    rows, channel = _rows_of(row_block, N, ROWS, GATED)
    row_mask = channel < N
    offs = tl.arange(0, BLOCK_K)
    words = tl.arange(0, BLOCK_K // WORD)
    w_ptrs = w_ptr + rows.to(tl.int64)[:, None] * (K // WORD) + (part * (SLICE // WORD) + words)[None, :]
    w0 = _weights(w_ptrs, row_mask, words, 0, SLICE // WORD, EVEN)
    if DEPTH > 1:
        w1 = _weights(w_ptrs, row_mask, words, BLOCK_K // WORD, SLICE // WORD, EVEN)
    if DEPTH > 2:
        w2 = _weights(w_ptrs, row_mask, words, 2 * BLOCK_K // WORD, SLICE // WORD, EVEN)
    _after_the_previous_kernel(PDL)
    k = part * SLICE + offs
    x = _absorb(x_ptr, d0_ptr, d1_ptr, d2_ptr, k, offs < SLICE, KEEP, DELTAS, "")
    g = tl.load(norm_ptr + k, mask=offs < SLICE, other=0.0)
    acc = tl.zeros([ROWS, BLOCK_K // 8], tl.float32)
    squares = tl.zeros([BLOCK_K], tl.float32)
    for start in range(0, SLICE, BLOCK_K):
        ahead = _weights(w_ptrs, row_mask, words, (start + DEPTH * BLOCK_K) // WORD, SLICE // WORD, EVEN)
        following = start + BLOCK_K + offs
        k_next = part * SLICE + following
        x_next = _absorb(x_ptr, d0_ptr, d1_ptr, d2_ptr, k_next, following < SLICE, KEEP, DELTAS, "")
        g_next = tl.load(norm_ptr + k_next, mask=following < SLICE, other=0.0)
        if STORES and row_block == (start // BLOCK_K) % tl.num_programs(0):  # each piece of the new stream is stored once
            tl.store(x_out_ptr + k, x, mask=start + offs < SLICE)
        acc += _times(w0, x * g.to(tl.float32), norm_ptr.dtype.element_ty, ROWS, BLOCK_K, WORD)
        squares += x * x
        k = k_next
        x = x_next
        g = g_next
        if DEPTH == 1:
            w0 = ahead
        elif DEPTH == 2:
            w0 = w1
            w1 = ahead
        else:
            w0 = w1
            w1 = w2
            w2 = ahead
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
def output_project(
    in_ptr,  # (K)
    w_ptr,  # (N, K), or in pairs
    stream_ptr,  # float32 (N), with ADD_STREAM
    other_ptr,  # (N), with ADD_OTHER
    out_ptr,  # (N): this rank's message
    stream_scale,
    N,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DEPTH: tl.constexpr,
    ADD_STREAM: tl.constexpr,
    ADD_OTHER: tl.constexpr,
    WORD: tl.constexpr,  # as in norm_project
    PDL: tl.constexpr,
):
    EVEN: tl.constexpr = K % BLOCK_K == 0
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row_mask = rows < N
    offs = tl.arange(0, BLOCK_K)
    words = tl.arange(0, BLOCK_K // WORD)
    w_ptrs = w_ptr + rows.to(tl.int64)[:, None] * (K // WORD) + words[None, :]
    w0 = _weights(w_ptrs, row_mask, words, 0, K // WORD, EVEN)
    if DEPTH > 1:
        w1 = _weights(w_ptrs, row_mask, words, BLOCK_K // WORD, K // WORD, EVEN)
    if DEPTH > 2:
        w2 = _weights(w_ptrs, row_mask, words, 2 * BLOCK_K // WORD, K // WORD, EVEN)
    _after_the_previous_kernel(PDL)
    x = tl.load(in_ptr + offs, mask=offs < K, other=0.0)
    acc = tl.zeros([ROWS, BLOCK_K // 8], tl.float32)
    for start in range(0, K, BLOCK_K):
        ahead = _weights(w_ptrs, row_mask, words, (start + DEPTH * BLOCK_K) // WORD, K // WORD, EVEN)
        following = start + BLOCK_K + offs
        x_next = tl.load(in_ptr + following, mask=following < K, other=0.0)
        acc += _times(w0, x.to(tl.float32), in_ptr.dtype.element_ty, ROWS, BLOCK_K, WORD)
        x = x_next
        if DEPTH == 1:
            w0 = ahead
        elif DEPTH == 2:
            w0 = w1
            w1 = ahead
        else:
            w0 = w1
            w1 = w2
            w2 = ahead
    y = tl.sum(acc, axis=1)
    if ADD_STREAM:
        y += stream_scale * tl.load(stream_ptr + rows, mask=row_mask, other=0.0)
    if ADD_OTHER:
        y += tl.load(other_ptr + rows, mask=row_mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + rows, y.to(out_ptr.dtype.element_ty), mask=row_mask)
