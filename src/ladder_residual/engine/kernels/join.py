"""What lies between two modules of a 16-bit stream, in one kernel: module outputs join the residual stream, and it is normed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_TERMS = 3
ABSENT, ADD, SUBTRACT, ADD_NORMED = (tl.constexpr(value) for value in range(4))


@triton.jit
def scaled_by_rms(x, norm_ptr, offs, mask, eps, K: tl.constexpr, OFFSET: tl.constexpr):
    """Norm weights may be stored less OFFSET (Gemma)."""
    g = tl.load(norm_ptr + offs, mask=mask, other=0.0).to(tl.float32) + OFFSET
    return x * tl.rsqrt(tl.sum(x * x, axis=0) / K + eps) * g


@triton.jit
def joined(x, term_ptr, norm_ptr, row, offs, mask, eps, KIND: tl.constexpr, K: tl.constexpr, OFFSET: tl.constexpr):
    if KIND == ABSENT:
        return x
    term = tl.load(term_ptr + row + offs, mask=mask, other=0.0).to(tl.float32)
    if KIND == SUBTRACT:
        return x - term
    if KIND == ADD_NORMED:
        term = scaled_by_rms(term, norm_ptr, offs, mask, eps, K, OFFSET)
    return x + term


@triton.jit
def join_and_norm(
    stream_ptr, a_ptr, b_ptr, c_ptr, a_norm_ptr, b_norm_ptr, c_norm_ptr, norm_ptr, stream_out_ptr, out_ptr, eps,
    K: tl.constexpr, BLOCK_K: tl.constexpr, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr, OFFSET: tl.constexpr,
    STORE_STREAM: tl.constexpr,
):  # fmt: skip
    """One row per program: the terms join the stream in float32, then out = rmsnorm(stream)."""
    row = tl.program_id(0).to(tl.int64) * K
    offs = tl.arange(0, BLOCK_K)
    mask = offs < K
    x = tl.load(stream_ptr + row + offs, mask=mask, other=0.0).to(tl.float32)
    x = joined(x, a_ptr, a_norm_ptr, row, offs, mask, eps, A, K, OFFSET)
    x = joined(x, b_ptr, b_norm_ptr, row, offs, mask, eps, B, K, OFFSET)
    x = joined(x, c_ptr, c_norm_ptr, row, offs, mask, eps, C, K, OFFSET)
    if STORE_STREAM:
        tl.store(stream_out_ptr + row + offs, x.to(stream_out_ptr.dtype.element_ty), mask=mask)
    y = scaled_by_rms(x, norm_ptr, offs, mask, eps, K, OFFSET)
    tl.store(out_ptr + row + offs, y.to(out_ptr.dtype.element_ty), mask=mask)


def norm_after_joining(
    stream: Tensor, terms: Sequence[tuple[Tensor, int, Tensor | None]], weight: Tensor, eps: float, offset: float
) -> tuple[Tensor, Tensor]:
    """(out, stream): ``terms`` are up to MAX_TERMS module outputs, each with how it joins and the weight of its own norm. Without terms the
    stream comes back as it was given."""
    assert len(terms) <= MAX_TERMS
    stream = stream.contiguous()
    hidden = stream.shape[-1]
    out, joined_stream = torch.empty_like(stream), torch.empty_like(stream) if terms else stream
    rows = stream.numel() // hidden
    if not rows:
        return out, joined_stream
    block = triton.next_power_of_2(hidden)
    filled = [*((term.contiguous(), kind, norm) for term, kind, norm in terms)]
    filled += [(stream, ABSENT.value, None)] * (MAX_TERMS - len(terms))
    tensors, kinds, norms = zip(*filled, strict=True)
    join_and_norm[(rows,)](
        stream, *tensors, *(weight if norm is None else norm for norm in norms), weight, joined_stream, out, eps,
        K=hidden, BLOCK_K=block, A=kinds[0], B=kinds[1], C=kinds[2], OFFSET=offset, STORE_STREAM=bool(terms),
        num_warps=min(16, max(4, block // 256)),
    )  # fmt: skip
    return out, joined_stream
