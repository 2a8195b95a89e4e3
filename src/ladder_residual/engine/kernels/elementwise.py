"""The small kernels between the matrix products: embedding, absorb + norm for larger batches, SiLU, and the emulated all-reduce."""

from __future__ import annotations

from ._triton import tl, tl_cuda, triton


@triton.jit
def embed(tokens_ptr, table_ptr, out_ptr, first_row, rows, hidden, BLOCK: tl.constexpr):
    """Vocabulary-parallel lookup: a token outside this rank's rows gives zeros, so that the sum over ranks is the embedding."""
    b = tl.program_id(0)
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(tokens_ptr + b) - first_row
    mine = (row >= 0) & (row < rows)
    x = tl.load(table_ptr + row.to(tl.int64) * hidden + offs, mask=(offs < hidden) & mine, other=0.0)
    tl.store(out_ptr + b * hidden + offs, x, mask=offs < hidden)


@triton.jit
def absorb_norm(
    x_ptr, d0_ptr, d1_ptr, d2_ptr, x_out_ptr, norm_ptr, out_ptr, eps,
    K: tl.constexpr, BLOCK_K: tl.constexpr, KEEP: tl.constexpr, DELTAS: tl.constexpr, STORES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One row per program: x += outputs (which STORES keeps), out = rmsnorm(x)."""
    row = tl.program_id(0).to(tl.int64) * K
    offs = tl.arange(0, BLOCK_K)
    mask = offs < K
    g = tl.load(norm_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    if PDL == 1:
        tl_cuda.gdc_launch_dependents()
    if PDL > 0:
        tl_cuda.gdc_wait()
    if PDL == 2:
        tl_cuda.gdc_launch_dependents()
    if KEEP:
        x = tl.load(x_ptr + row + offs, mask=mask, other=0.0)
    else:
        x = tl.zeros([BLOCK_K], tl.float32)
    if DELTAS > 0:
        x += tl.load(d0_ptr + row + offs, mask=mask, other=0.0).to(tl.float32)
    if DELTAS > 1:
        x += tl.load(d1_ptr + row + offs, mask=mask, other=0.0).to(tl.float32)
    if DELTAS > 2:
        x += tl.load(d2_ptr + row + offs, mask=mask, other=0.0).to(tl.float32)
    if STORES:
        tl.store(x_out_ptr + row + offs, x, mask=mask)
    y = x * tl.rsqrt(tl.sum(x * x, axis=0) / K + eps) * g
    tl.store(out_ptr + row + offs, y.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def silu_multiply(in_ptr, out_ptr, F, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """(B, 2F) gate | up -> (B, F)."""
    b = tl.program_id(0).to(tl.int64)
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < F
    if PDL == 1:
        tl_cuda.gdc_launch_dependents()
    if PDL > 0:
        tl_cuda.gdc_wait()
    if PDL == 2:
        tl_cuda.gdc_launch_dependents()
    gate = tl.load(in_ptr + b * 2 * F + offs, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(in_ptr + b * 2 * F + F + offs, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + b * F + offs, (gate * tl.sigmoid(gate) * up).to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def copy_that_lasts(in_ptr, out_ptr, count, nanoseconds, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Stand-in for an all-reduce: copies the message, then keeps its few programs busy until the link's time has passed."""
    if PDL == 1:
        tl_cuda.gdc_launch_dependents()
    if PDL > 0:
        tl_cuda.gdc_wait()
    if PDL == 2:
        tl_cuda.gdc_launch_dependents()
    began = tl_cuda.globaltimer()
    for start in range(tl.program_id(0) * BLOCK, count, tl.num_programs(0) * BLOCK):
        offs = start + tl.arange(0, BLOCK)
        tl.store(out_ptr + offs, tl.load(in_ptr + offs, mask=offs < count), mask=offs < count)
    while tl_cuda.globaltimer() - began < nanoseconds:
        pass


@triton.jit
def step_positions(positions_ptr, count, BLOCK: tl.constexpr):
    """The last kernel of a step: every sequence is one token longer."""
    offs = tl.arange(0, BLOCK)
    mask = offs < count
    tl.store(positions_ptr + offs, tl.load(positions_ptr + offs, mask=mask, other=0) + 1, mask=mask)
