"""A decode step of a few sequences with Triton GEMMs on the interpreter against the reference."""

from __future__ import annotations

from functools import partial

import pytest

from ladder_residual.engine.cuda.pdl import PdlMode
from ladder_residual.engine.ops import tiles
from ladder_residual.engine.ops.small_batch import SmallBatchOps
from ladder_residual.engine.ops.tiles import SmallBatchTiles
from tests.engine.tiny import TOLERANCE, decode_error, tiny_shape

pytestmark = pytest.mark.usefixtures("interpreter")


def small_batch_ops(max_rows: int = 16, split_k: int = 1, kv_splits: int = 2):
    return partial(SmallBatchOps, tiles=SmallBatchTiles(max_rows, split_k), pdl=PdlMode.OFF, kv_splits=kv_splits)


@pytest.mark.parametrize(
    ("family", "batch", "schedule"), [("llama", 2, "two_stream"), ("qwen2", 3, "interleaved"), ("qwen3", 16, "two_stream")]
)
def test_families_and_schedules(family: str, batch: int, schedule: str) -> None:
    assert decode_error(tiny_shape(family), "ladder", small_batch_ops(), batch=batch, schedule=schedule) < TOLERANCE


@pytest.mark.parametrize("wiring", ["parallel", "desync-3x"])
def test_what_is_added_to_a_partial(wiring: str) -> None:
    shape = tiny_shape(num_heads=4, num_kv_heads=2)
    assert decode_error(shape, wiring, small_batch_ops(kv_splits=1), batch=3, prompt=2, tp=2, rank=1) < TOLERANCE


def test_sizes_that_do_not_fill_a_tile() -> None:
    shape = tiny_shape(hidden_size=72, intermediate_size=44, num_heads=3, num_kv_heads=1)
    assert decode_error(shape, "standard", small_batch_ops(64, split_k=3, kv_splits=1), batch=5, prompt=2) < TOLERANCE


@pytest.mark.parametrize(
    ("family", "rows", "split_k", "hidden", "intermediate"),
    [("qwen2", 16, 2, 272, 136), ("qwen3", 32, 4, 520, 136), ("llama", 64, 1, 520, 264)],
)
def test_every_tile(
    family: str, rows: int, split_k: int, hidden: int, intermediate: int, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """Sizes of two or three tiles each, so that the loop over them runs: of gate and up, of a split-K part, of the others."""
    monkeypatch.setattr(tiles, "MIN_PROGRAMS", 1)  # a model this small would get the smallest tile
    tile = SmallBatchTiles(rows, split_k).tile(hidden, gated=False)
    assert tile.rows == rows
    assert min(hidden // split_k, intermediate) > tile.block_k
    shape = tiny_shape(family, hidden_size=hidden, intermediate_size=intermediate)
    assert decode_error(shape, "ladder", small_batch_ops(rows, split_k), batch=5, prompt=2) < TOLERANCE


def test_a_split_that_would_drop_columns_is_refused() -> None:
    with pytest.raises(ValueError, match="split_k=5 does not divide a hidden size of 48"):
        decode_error(tiny_shape(), "ladder", small_batch_ops(split_k=5), batch=2, prompt=1)


def test_other_batches_are_refused() -> None:
    with pytest.raises(ValueError, match="the Triton GEMM takes 2 to 16 sequences, got 17"):
        decode_error(tiny_shape(), "ladder", small_batch_ops(), batch=17, prompt=1)
