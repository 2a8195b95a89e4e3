"""Every GEMV kernel with packed weights of every type, on the interpreter, against torch."""

from __future__ import annotations

import pytest
import torch

from ladder_residual.engine.ops.tiles import packed


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_packed_weights(dtype: torch.dtype) -> None:
    """Rows and columns that do not fill a tile, rows of small and of large weights."""
    from ladder_residual.engine.kernels import gemv, persistent_gemv

    rows, columns = 22, 72
    generator = torch.Generator().manual_seed(6)
    weights = (torch.randn(rows, columns, generator=generator) * torch.logspace(-3, 3, rows)[:, None]).to(dtype)
    norm, x = torch.rand(columns, generator=generator).to(dtype), torch.randn(columns, generator=generator)
    assert packed(weights).shape == (rows, columns // 2)
    normed = x * torch.rsqrt(x.square().mean() + 1e-5) * norm.float()

    def check(found: torch.Tensor, vector: torch.Tensor) -> None:
        size = (weights.float().abs() @ vector.abs()).clamp(min=1e-30)
        assert ((found - weights.float() @ vector).abs() / size).max() < 1e-6

    def out() -> torch.Tensor:
        return torch.full((rows,), float("nan"), dtype=torch.float32)

    inputs = (x, norm, norm, norm, torch.empty(columns), norm)  # nothing to add to the stream
    constants = {"K": columns, "KEEP_STREAM": True, "NUM_ADDS": 0, "STORE_STREAM": False, "GATED": False, "PDL": 0}
    persistent = {"WIDTH": 128, "STORE_WIDTH": 64, "ROWS": 4, **constants}
    for second in (False, True):
        found = out()
        persistent_gemv.persistent_norm_gemv[(2,)](
            *inputs, packed(weights), found, packed(weights), 1e-5, rows, 3, 3, 2, **persistent, PREFETCH_SECOND=second,
            THREADS=32, L2_PREFETCH=0, TRIGGER_AT=0,
        )  # fmt: skip
        check(found, normed)
    found = out()
    persistent_gemv.persistent_norm_gemv_smem[(2,)](
        *inputs, packed(weights), found, 1e-5, rows, **persistent, SMEM_TILES=2
    )  # fmt: skip
    check(found, normed)
    for pack, given in ((1, weights), (2, packed(weights))):
        found, tile = out(), {"ROWS": 8, "BLOCK_K": 32, "PACK": pack, "GROUP": 0, "FORMAT": 0}
        gemv.norm_gemv[(3, 1)](
            *inputs, given, found, found, None, None, 1e-5, rows, **tile, PREFETCH=2, SPLIT_K=1, **constants
        )  # fmt: skip
        check(found, normed)
        found, inner = out(), x.to(dtype)
        gemv.gemv[(3,)](
            inner, given, x, norm, found, None, None, 1.0, rows, K=columns, **tile, PREFETCH=1, ADD_STREAM=False,
            ADD_PARTIAL=False, PDL=0
        )  # fmt: skip
        check(found, inner.float())
