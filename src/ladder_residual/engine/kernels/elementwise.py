"""The small kernels between the GEMMs: embedding, residual add + RMSNorm, SiLU, and the emulated all-reduce."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import cuda as tl_cuda

from .common import load_stream, wait_for_previous_kernel


@triton.jit
def embed(tokens_ptr, table_ptr, out_ptr, first_row, rows, hidden, BLOCK: tl.constexpr):
    """Vocabulary-parallel lookup: a token outside this rank's rows gives zeros, so that the all-reduce gives the embedding."""
    b = tl.program_id(0)
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(tokens_ptr + b) - first_row
    mine = (row >= 0) & (row < rows)
    x = tl.load(table_ptr + row.to(tl.int64) * hidden + offs, mask=(offs < hidden) & mine, other=0.0)
    tl.store(out_ptr + b * hidden + offs, x, mask=offs < hidden)


@triton.jit
def add_rms_norm(
    x_ptr, d0_ptr, d1_ptr, d2_ptr, x_out_ptr, norm_ptr, out_ptr, eps,
    K: tl.constexpr, BLOCK_K: tl.constexpr, KEEP_STREAM: tl.constexpr, NUM_ADDS: tl.constexpr, STORE_STREAM: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One row per program: x += module outputs (stored with STORE_STREAM), out = rmsnorm(x)."""
    row = tl.program_id(0).to(tl.int64) * K
    offs = tl.arange(0, BLOCK_K)
    mask = offs < K
    g = tl.load(norm_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    wait_for_previous_kernel(PDL)
    x = load_stream(x_ptr, d0_ptr, d1_ptr, d2_ptr, row, offs, mask, KEEP_STREAM, NUM_ADDS, "")
    if STORE_STREAM:
        tl.store(x_out_ptr + row + offs, x, mask=mask)
    y = x * tl.rsqrt(tl.sum(x * x, axis=0) / K + eps) * g
    tl.store(out_ptr + row + offs, y.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def silu_and_mul(in_ptr, out_ptr, F, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """(B, 2F) gate | up -> (B, F)."""
    b = tl.program_id(0).to(tl.int64)
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < F
    wait_for_previous_kernel(PDL)
    gate = tl.load(in_ptr + b * 2 * F + offs, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(in_ptr + b * 2 * F + F + offs, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + b * F + offs, (gate * tl.sigmoid(gate) * up).to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def timed_copy(in_ptr, out_ptr, count, nanoseconds, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Emulated all-reduce: copies the message, then keeps its few programs busy until ``nanoseconds`` have passed."""
    wait_for_previous_kernel(PDL)
    began = tl_cuda.globaltimer()
    for start in range(tl.program_id(0) * BLOCK, count, tl.num_programs(0) * BLOCK):
        offs = start + tl.arange(0, BLOCK)
        tl.store(out_ptr + offs, tl.load(in_ptr + offs, mask=offs < count), mask=offs < count)
    while tl_cuda.globaltimer() - began < nanoseconds:
        pass


@triton.jit
def advance_positions(positions_ptr, count, BLOCK: tl.constexpr):
    """The last kernel of a step: every sequence is one token longer."""
    offs = tl.arange(0, BLOCK)
    mask = offs < count
    tl.store(positions_ptr + offs, tl.load(positions_ptr + offs, mask=mask, other=0) + 1, mask=mask)
