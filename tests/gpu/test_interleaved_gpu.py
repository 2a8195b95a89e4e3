"""A woven line whose products do not wait before they read: on a real GPU, bit for bit what the waiting line computes.
``python tests/gpu/test_woven_gpu.py`` runs it without pytest."""

from __future__ import annotations

import sys
import warnings
from dataclasses import replace
from unittest.mock import patch

import torch
from test_engine_gpu import SHAPE, main, parametrize

from ladder_residual.config import Wiring
from ladder_residual.engine import DecodeEngine, EngineSpec, RankSizes, decoder, parse_link, random_weights, stack_weights
from ladder_residual.engine.gemv_ops import GemvTiles
from ladder_residual.engine.launcher import BEHIND, BEHIND_BUT_NEWEST
from ladder_residual.engine.multiprocessors import multiprocessors
from ladder_residual.presets import ModelShape

try:
    import pytest

    pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
except ImportError:  # a bare machine
    pass

STEPS = 60


def logits_of_steps(shape: ModelShape, link: str, tiles: GemvTiles, *, reads_before: bool) -> torch.Tensor:
    spec, sizes, wiring = EngineSpec.from_shape(shape), RankSizes.of(shape, 2, 0), Wiring.parse("ladder", shape.num_layers)
    torch.manual_seed(5)
    weights = stack_weights(spec, sizes, random_weights(spec, 2, 0, torch.bfloat16, "cuda"))
    tokens = torch.randint(0, sizes.vocab_tokens, (STEPS,), device="cuda")
    with warnings.catch_warnings(), patch.object(decoder, "can_change_edges", lambda: reads_before):
        warnings.simplefilter("error")  # it falls back to waiting with a warning
        engine = DecodeEngine(
            spec,
            wiring,
            weights,
            tp=2,
            reducer="emulated",
            link=parse_link(link),
            max_context=2560,
            schedule="woven",
            tiles=tiles,
        )
    waits = engine._executing.ops.launchers[0].started.values()
    assert any(how in (BEHIND, BEHIND_BUT_NEWEST) for how in waits) == reads_before
    early = reads_before and tiles.early_sums and link != "none" and not link.endswith("+launch")
    assert bool(engine._executing.early_sums) == early
    torch.manual_seed(6)
    engine.reset(1000, random_context=True)
    return torch.stack([engine.decode(tokens[step : step + 1]).clone() for step in range(STEPS)])


def woven_tiles(shape: ModelShape) -> list[GemvTiles]:
    return [tiles for tiles in GemvTiles.candidates(RankSizes.of(shape, 2, 0), 2560) if "woven" in tiles.schedules]


@parametrize("link", ["none", "1us", "5us", "5us+launch", "20us"])
@parametrize("hidden", [1024, 2048])
@parametrize("which", [0, 1, 2])
def test_reading_before_waiting_changes_no_bit(link: str, hidden: int, which: int) -> None:
    # gate/up's walks have several blocks, those of the first programs more
    shape = replace(SHAPE, num_layers=12, hidden_size=hidden, intermediate_size=28672)
    tiles = woven_tiles(shape)[which]
    sizes, walk = RankSizes.of(shape, 2, 0), tiles.gate_up
    blocks, most = 2 * sizes.intermediate // walk.rows, walk.walkers * multiprocessors(torch.device("cuda"))
    assert blocks > 2 * most or not walk.walkers
    assert bool(tiles.qkv.walkers) == ((hidden, which) != (2048, 2))  # there QKV is cut into slices: only gate/up reads before
    waiting = logits_of_steps(shape, link, tiles, reads_before=False)
    assert torch.isfinite(waiting).all()
    assert torch.equal(waiting, logits_of_steps(shape, link, tiles, reads_before=True))


if __name__ == "__main__":
    sys.exit(main(tests=dict(globals())))
