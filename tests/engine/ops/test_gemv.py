"""A decode step of one token on the interpreter against the reference, with poisoned buffers."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from ladder_residual.engine.cuda.pdl import PdlMode
from ladder_residual.engine.ops.gemm import GemmOps
from ladder_residual.engine.ops.gemv import GemvOps
from ladder_residual.engine.ops.tiles import GemvTiles, Tile
from ladder_residual.engine.spec import RankSizes
from tests.engine.tiny import TOLERANCE, decode_error, tiny_shape, tiny_tiles

pytestmark = pytest.mark.usefixtures("interpreter")
TWO_RANKS = dict(tp=2, rank=1)  # of a shape with an even number of heads and KV heads


def gemv_ops(tiles: GemvTiles):
    return partial(GemvOps, tiles=tiles, pdl=PdlMode.OFF)


@pytest.mark.parametrize(
    ("family", "split_k", "kv_splits", "num_stages", "packed"),
    [("llama", 1, 1, 1, False), ("qwen2", 3, 2, 2, True), ("qwen3", 2, 3, 3, False), ("llama", 2, 3, 3, True)],
)
def test_families_and_tiles(family: str, split_k: int, kv_splits: int, num_stages: int, packed: bool) -> None:
    tiles = tiny_tiles(split_k, kv_splits, num_stages)
    tiles = tiles.with_packed_weights() if packed else tiles
    assert decode_error(tiny_shape(family), "ladder", gemv_ops(tiles), prompt=19) < TOLERANCE


@pytest.mark.parametrize("smem_tiles", [0, 3])
@pytest.mark.parametrize(("wiring", "rows"), [("ladder", 16), ("parallel", 4), ("desync-2x", 8)])
def test_persistent_kernels(wiring: str, rows: int, smem_tiles: int) -> None:
    """Two programs: each takes several blocks of rows, the last one not full."""
    persistent = Tile(rows, 128, 1, programs_per_sm=1, smem_tiles=smem_tiles)
    tiles = replace(tiny_tiles(1, 2), qkv=replace(persistent, rows=64), gate_up=persistent, head=persistent)
    shape = tiny_shape(hidden_size=72, intermediate_size=44, num_heads=4, num_kv_heads=2)  # no power of two
    assert decode_error(shape, wiring, gemv_ops(tiles), **TWO_RANKS) < TOLERANCE


@pytest.mark.parametrize("head_dim", [128, 256])
def test_wider_heads(head_dim: int) -> None:
    shape = tiny_shape(head_dim=head_dim)
    assert decode_error(shape, "ladder", gemv_ops(tiny_tiles(1, 2)), prompt=17) < TOLERANCE
    several = partial(GemmOps, pdl=PdlMode.OFF, kv_splits=2)
    assert decode_error(shape, "ladder", several, batch=2, prompt=17) < TOLERANCE


@pytest.mark.parametrize("wiring", ["parallel", "desync-3x", "ladder:1"])
def test_wirings(wiring: str) -> None:
    shape = tiny_shape(num_heads=4, num_kv_heads=2)
    ops = gemv_ops(tiny_tiles(1, 2).with_packed_weights())
    assert decode_error(shape, wiring, ops, **TWO_RANKS) < TOLERANCE


@pytest.mark.parametrize("schedule", ["two_stream", "interleaved"])
def test_schedules_without_a_context(schedule: str) -> None:
    assert decode_error(tiny_shape(), "ladder", gemv_ops(tiny_tiles(3, 4)), prompt=0, schedule=schedule) < TOLERANCE


@pytest.mark.parametrize("wiring", ["parallel", "ladder:1"])
def test_other_wirings_interleaved(wiring: str) -> None:
    shape = tiny_shape(num_heads=4, num_kv_heads=2)
    assert decode_error(shape, wiring, gemv_ops(tiny_tiles(1, 2)), schedule="interleaved", **TWO_RANKS) < TOLERANCE


@pytest.mark.parametrize("packed", [False, True])
def test_sizes_that_do_not_fill_a_tile(packed: bool) -> None:
    shape = tiny_shape(hidden_size=72, intermediate_size=44, num_heads=3, num_kv_heads=1)
    tiles = tiny_tiles(1, 2, num_stages=2, block_k=64)
    assert decode_error(shape, "standard", gemv_ops(tiles.with_packed_weights() if packed else tiles)) < TOLERANCE


def test_an_odd_width_is_read_unpacked() -> None:
    shape = tiny_shape(intermediate_size=45)
    assert decode_error(shape, "ladder", gemv_ops(tiny_tiles(1, 2).with_packed_weights())) < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("index", range(9))
def test_every_candidate_of_a_rank(index: int) -> None:
    """As an engine of 16-bit weights times them, QKV with split-K and the rest; here in float32, one program after another."""
    shape = tiny_shape(hidden_size=2048, intermediate_size=64)
    candidates = GemvTiles.candidates(RankSizes.of(shape, 1, 0), 64, itemsize=2)
    assert len(candidates) == 9
    tiles = candidates[index]
    schedule = "interleaved" if "interleaved" in tiles.schedules else "two_stream"
    assert decode_error(shape, "ladder", gemv_ops(tiles), prompt=2, schedule=schedule) < TOLERANCE
