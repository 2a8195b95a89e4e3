"""Which tiles are offered, and how persistent programs share the blocks of rows."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ladder_residual.engine.ops.tiles import GemvTiles, SmallBatchTiles, Tile, block_counts, persistent_programs
from ladder_residual.engine.spec import HEAD_DIMS, RankSizes
from ladder_residual.models.presets import ModelShape, presets
from tests.gpu.test_engine_gpu import CANDIDATES, SHAPE

RANK_OF_70B = RankSizes.of(presets()["llama-3-70b"], 8, 0)


def divides(shape: ModelShape, tp: int) -> bool:
    kv_heads = shape.num_kv_heads
    return not (shape.num_heads % tp or shape.intermediate_size % tp or (kv_heads % tp and tp % kv_heads))


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_candidates_fit_every_preset(tp: int) -> None:
    for name, preset in presets().items():
        if not preset.gated_mlp or preset.head_dim not in HEAD_DIMS or not divides(preset, tp):
            continue
        sizes = RankSizes.of(preset, tp, 0)
        candidates = GemvTiles.candidates(sizes, 2048)
        # without persistent kernels: both sets of a rank and both of a whole model
        assert len(set(candidates)) == len(candidates) >= 4, name
        for tiles in candidates:
            assert sizes.hidden % tiles.split_k == 0, name
            for tile in (tiles.qkv, tiles.output, tiles.gate_up, tiles.down, tiles.head):
                all_of_x = sizes.hidden <= tile.block_k == 512 * tile.num_warps <= 2 * sizes.hidden  # 16 columns a thread
                assert all_of_x if tile.programs_per_sm else tile.block_k == 256 * tile.num_warps, (name, tile)
        small = SmallBatchTiles.candidates(sizes)
        assert all(sizes.hidden % tiles.split_k == 0 for tiles in small), name
        weights = (sizes.hidden, sizes.vocab_rows, sizes.qkv_width)
        used = [tuple(tiles.tile(rows, gated=False) for rows in weights) for tiles in small]
        assert len(set(used)) == len(used) > 0, name  # none is timed twice


def test_tiles_in_shared_memory_are_offered_where_they_fit() -> None:
    def offered(**limits: int) -> int:
        return sum(tiles.gate_up.smem_tiles > 0 for tiles in GemvTiles.candidates(RANK_OF_70B, 2048, **limits))

    assert offered() == 1
    assert offered(max_shared_memory=100 << 10) == offered(itemsize=4) == 0


def test_tiles_say_whether_all_reduces_are_launched_early() -> None:
    candidates = GemvTiles.candidates(RANK_OF_70B, 2048)
    interleaved = [tiles for tiles in candidates if "interleaved" in tiles.schedules]
    early = [tiles for tiles in candidates if tiles.pdl_all_reduce]
    assert early == [*(tiles for tiles in candidates if tiles.gate_up.smem_tiles), *interleaved[:2]]
    assert len(early) == 3


def test_tiles_of_an_interleaved_step() -> None:
    """Its QKV and gate/up are persistent, so that they can read before they wait, and attention has no more programs than find room."""
    candidates = GemvTiles.candidates(RANK_OF_70B, 2560)
    interleaved = [tiles for tiles in candidates if "interleaved" in tiles.schedules]
    first = interleaved[0]
    assert (first.qkv.programs_per_sm, first.gate_up.programs_per_sm) == (1, 1)
    assert (first.gate_up.trigger_after, first.kv_splits) == (0.7, 16)
    assert [tiles.gate_up.prefetch_second for tiles in interleaved] == [True, True, False]
    assert [tiles.kv_splits for tiles in interleaved[:2]] == [16, 8]
    assert all(tiles.schedules == ("serial", "two_stream") for tiles in candidates if tiles not in interleaved)
    long = GemvTiles.candidates(RANK_OF_70B, 32768)
    assert [tiles.kv_splits for tiles in long if "interleaved" in tiles.schedules] == [32, 16, 32]


def test_the_gpu_tests_cover_every_candidate() -> None:
    ranks = [RankSizes.of(presets()[name], tp, 0) for name in ("llama-3-70b", "llama-3.1-8b") for tp in (1, 8)]
    ranks += [RankSizes.of(replace(SHAPE, hidden_size=hidden), 2, 0) for hidden in (576, 2048)]
    assert max(len(GemvTiles.candidates(sizes, context)) for sizes in ranks for context in (101, 2560)) == CANDIDATES


def test_a_persistent_qkv_takes_whole_rows() -> None:
    tile = Tile(4, 64, 1)
    with pytest.raises(ValueError, match="a persistent QKV kernel takes whole rows, not split_k=2: set split_k=1"):
        GemvTiles(replace(tile, programs_per_sm=1), tile, tile, tile, tile, split_k=2, kv_splits=1)


@pytest.mark.parametrize("tail_share", [1, 0.5, 0.3])
@pytest.mark.parametrize("blocks", [1, 3, 131, 132, 133, 264, 320, 1792, 4008])
def test_every_block_has_one_program(blocks: int, tail_share: float) -> None:
    """The loops as persistent_norm_gemv runs them: programs in turn, and after the common rounds the first ones in turn."""
    programs = persistent_programs(blocks, 132)
    each, of_first, first = block_counts(blocks, programs, tail_share)
    assert 1 <= each <= of_first
    assert 1 <= first <= programs
    assert of_first - each <= (2 if tail_share >= 0.5 else 4)
    computed = []
    for program in range(programs):
        block = program
        for at in range(of_first if program < first else each):
            computed.append(block)
            block += programs if at < each else first
    assert sorted(block for block in computed if block < blocks) == list(range(blocks))


def test_no_more_is_prefetched_than_there_is() -> None:
    pairs = torch.empty(100, 10, dtype=torch.int32)
    assert Tile(4, 64, 1, l2_prefetch_bytes=64).l2_prefetch(2, pairs) == 16
    assert Tile(4, 64, 1, l2_prefetch_bytes=4000).l2_prefetch(8, pairs) == 124  # of 125, in whole 16 bytes
    assert Tile(4, 64, 1).l2_prefetch(8, pairs) == 0
