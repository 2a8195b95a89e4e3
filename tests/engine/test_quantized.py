"""Quantised weights: their packing, their dequantisation, and decode steps on the interpreter against the dequantised model in float32."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from ladder_residual.core.config import Wiring
from ladder_residual.engine.cache import KVCache
from ladder_residual.engine.cuda.pdl import PdlMode
from ladder_residual.engine.ops import tiles
from ladder_residual.engine.ops.gemm import GemmOps
from ladder_residual.engine.ops.gemv import GemvOps
from ladder_residual.engine.ops.prefill import FusedPrefillOps, PrefillOps
from ladder_residual.engine.ops.small_batch import SmallBatchOps
from ladder_residual.engine.ops.tiles import GemvTiles, SmallBatchTiles, Tile
from ladder_residual.engine.quantized import QuantizedWeight, dense, rounded, stacked
from ladder_residual.engine.spec import RankSizes
from tests.engine.tiny import CPU, TOLERANCE, decode_error, make_executor, random_tokens, tiny_rank, tiny_shape

interpreted = pytest.mark.usefixtures("interpreter")
# format, columns of a group, zero points
FORMATS = {
    "fp8": ("fp8", None, False), "fp8-blocks": ("fp8", 128, False), "int4-rows": ("int4", None, True),
    "int4-32": ("int4", 32, True), "int4-64": ("int4", 64, False), "int4-128": ("int4", 128, False),
    "int4-128-zeros": ("int4", 128, True),
}  # fmt: skip
TWO_RANKS = dict(tp=2, rank=1)
SHAPE = tiny_shape(
    hidden_size=384, intermediate_size=256, num_heads=4, num_kv_heads=2
)  # whole groups of 128 on each of two ranks


def gemv_ops(stages: int = 1, split_k: int = 1):
    """Tiles of 256 columns: K is one and a half of them, or half of one."""
    tile, head = Tile(128, 256, 1, stages), Tile(32, 64, 1)
    sized = GemvTiles(tile, tile, tile, tile, head, split_k=split_k, kv_splits=2, block_kv=16)
    return partial(GemvOps, tiles=sized, pdl=PdlMode.OFF)


def ops_of(batch: int):
    return gemv_ops() if batch == 1 else partial(SmallBatchOps, tiles=SmallBatchTiles(64, 1), pdl=PdlMode.OFF, kv_splits=2)


# The tile of batch 3, all of it used: two formats show that here, and the others take as long again.
@interpreted
@pytest.mark.parametrize(
    ("name", "batch"),
    [
        *((name, batch) for name in FORMATS for batch in (1, 3)),
        *(
            pytest.param(name, 16, marks=[] if name in ("fp8-blocks", "int4-128-zeros") else pytest.mark.slow)
            for name in FORMATS
        ),
    ],
)
def test_formats_and_batches(name: str, batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "MIN_PROGRAMS", 1)  # a model this small would get the smallest tile
    error = decode_error(SHAPE, "ladder", ops_of(batch), batch=batch, quantise=FORMATS[name], **TWO_RANKS)
    assert error < TOLERANCE


@interpreted
@pytest.mark.parametrize(
    ("wiring", "schedule", "batch", "name"),
    [
        ("standard", "serial", 1, "fp8"), ("ladder:1", "two_stream", 1, "int4-64"), ("ladder", "interleaved", 1, "fp8-blocks"),
        ("parallel", "interleaved", 1, "int4-128"), ("desync-3x", "serial", 1, "fp8"), ("ladder", "two_stream", 3, "fp8"),
        ("parallel", "serial", 3, "int4-128-zeros"), ("desync-3x", "serial", 3, "fp8"), ("ladder:1", "interleaved", 3, "int4-32"),
    ],
)  # fmt: skip
def test_wirings_and_schedules(wiring: str, schedule: str, batch: int, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "MIN_PROGRAMS", 1)
    asked = dict(batch=batch, schedule=schedule, quantise=FORMATS[name])
    assert decode_error(SHAPE, wiring, ops_of(batch), **asked, **TWO_RANKS) < TOLERANCE


@interpreted
@pytest.mark.parametrize("name", ["fp8", "int4-128-zeros"])
def test_split_k_and_tiles_loaded_ahead(name: str) -> None:
    assert decode_error(SHAPE, "ladder", gemv_ops(3, split_k=3), quantise=FORMATS[name]) < TOLERANCE


@pytest.mark.slow
@interpreted
@pytest.mark.parametrize("format", ["fp8", "int4"])
def test_tiles_of_the_engine(format: str) -> None:
    for candidate in GemvTiles.quantized(RankSizes.of(SHAPE, 1, 0), 64, format)[::3]:
        ops = partial(GemvOps, tiles=candidate, pdl=PdlMode.OFF)
        shape = tiny_shape(hidden_size=128, intermediate_size=128)
        assert decode_error(shape, "ladder", ops, quantise=(format, 64 if format == "int4" else None, False)) < TOLERANCE


@pytest.mark.slow
@interpreted
@pytest.mark.parametrize("name", ["fp8-blocks", "int4-32"])
def test_larger_batches_dequantise(name: str) -> None:
    ops = partial(GemmOps, pdl=PdlMode.OFF, kv_splits=2)
    assert decode_error(SHAPE, "ladder", ops, batch=17, quantise=FORMATS[name]) < TOLERANCE


@pytest.mark.slow
@interpreted
@pytest.mark.parametrize("name", ["fp8-blocks", "int4-32"])
def test_prompts_dequantise(name: str) -> None:
    spec, sizes, weights = tiny_rank(SHAPE)
    weights = weights.with_projections(lambda weight: rounded(weight, *FORMATS[name]))
    found = []
    for kind in (PrefillOps, FusedPrefillOps):
        made = kind(spec, sizes, weights, KVCache(spec, sizes, 2, 16, torch.float32, CPU), 3)
        logits = torch.full((6, sizes.vocab_rows), float("nan"))
        make_executor(Wiring.parse("ladder", 2), "serial", made, sizes, 6).run(random_tokens(SHAPE, 2, 3), logits)
        found.append(logits)
    torch.testing.assert_close(*found, rtol=2e-5, atol=2e-6)


@interpreted
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dense_equals_plain_torch(name: str, dtype: torch.dtype) -> None:
    weight = rounded(torch.randn(5, 384, generator=torch.Generator().manual_seed(1)), *FORMATS[name])
    expected = weight.float()
    if dtype == torch.bfloat16:  # a GPU rounds to it, Triton's interpreter cuts
        expected = (expected.view(torch.int32) & ~0xFFFF).view(torch.float32)
    assert torch.equal(dense(weight, dtype), expected.to(dtype))


def test_every_number_of_fp8_survives() -> None:
    """Also the smallest, which have no exponent."""
    values = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).view(8, 32)
    weight = QuantizedWeight.pack("fp8", values, torch.ones(8, 1), None, 32)
    torch.testing.assert_close(weight.float(), values.float(), rtol=0, atol=0, equal_nan=True)


@interpreted
def test_the_kernels_decode_every_number_of_fp8() -> None:
    values = torch.arange(256, dtype=torch.uint8)
    values[values % 128 == 127] = 0  # NaN
    values = values.view(torch.float8_e4m3fn).view(8, 32)
    weight = QuantizedWeight.pack("fp8", values, torch.full((8, 1), 0.5), None, 32)
    assert torch.equal(dense(weight, torch.float32), values.float() / 2)


def test_a_group_that_cuts_16_bytes_is_refused() -> None:
    with pytest.raises(ValueError, match="48 columns: the CUDA engine reads int4 by 32 columns"):
        QuantizedWeight.pack("int4", torch.zeros(8, 48, dtype=torch.uint8), torch.ones(8, 1), None, 48)
    with pytest.raises(ValueError, match="64 columns in groups of 16: the CUDA engine reads int4 by 32 columns"):
        QuantizedWeight.pack("int4", torch.zeros(8, 64, dtype=torch.uint8), torch.ones(8, 4), None, 16)


def test_weights_of_one_kernel_must_be_alike() -> None:
    plain, fp8 = torch.zeros(8, 64), rounded(torch.ones(8, 64), "fp8")
    with pytest.raises(ValueError, match="weights that one kernel reads differ"):
        stacked([plain, fp8])
    assert stacked([fp8, fp8]).shape == (16, 64)
