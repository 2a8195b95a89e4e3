"""An interleaved step whose kernels read before they wait: on a real GPU, bit for bit what the waiting one computes.

``PYTHONPATH=src:. python tests/gpu/test_interleaved_gpu.py`` runs it from a clone without pytest.
"""

from __future__ import annotations

import sys
import warnings
from dataclasses import replace
from unittest.mock import patch

import torch

from ladder_residual.core.config import Wiring
from ladder_residual.engine import DecodeEngine, EngineSpec, RankSizes, engine, random_weights, stack_weights
from ladder_residual.engine.cuda.device import sm_count
from ladder_residual.engine.cuda.pdl import PdlMode
from ladder_residual.engine.ops.tiles import GemvTiles
from ladder_residual.links import parse_link
from ladder_residual.models.presets import ModelShape
from tests.gpu.test_engine_gpu import SHAPE, main, parametrize

try:
    import pytest

    pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
except ImportError:  # a bare machine
    pass

STEPS = 60


def logits_of_steps(shape: ModelShape, link: str, tiles: GemvTiles, *, reads_before_wait: bool) -> torch.Tensor:
    spec, sizes, wiring = EngineSpec.from_shape(shape), RankSizes.of(shape, 2, 0), Wiring.parse("ladder", shape.num_layers)
    torch.manual_seed(5)
    weights = stack_weights(spec, sizes, random_weights(spec, 2, 0, torch.bfloat16, "cuda"))
    tokens = torch.randint(0, sizes.vocab_tokens, (STEPS,), device="cuda")
    with warnings.catch_warnings(), patch.object(engine, "can_edit_edges", lambda: reads_before_wait):
        warnings.simplefilter("error")  # it falls back to waiting with a warning
        decoder = DecodeEngine(
            spec, wiring, weights, tp=2, reducer="emulated", link=parse_link(link), max_context=2560, schedule="interleaved",
            tiles=tiles,
        )  # fmt: skip
    modes = decoder._executor.ops.launchers[0].launched.values()
    assert any(mode >= PdlMode.WAIT_AFTER_COMPUTE for mode in modes) == reads_before_wait
    early = reads_before_wait and tiles.pdl_all_reduce and link != "none" and not link.endswith("no-pdl")
    assert bool(decoder._executor.early_all_reduces) == early
    torch.manual_seed(6)
    decoder.reset(1000, random_context=True)
    return torch.stack([decoder.decode(tokens[step : step + 1]).clone() for step in range(STEPS)])


def interleaved_tiles(shape: ModelShape) -> list[GemvTiles]:
    return [tiles for tiles in GemvTiles.candidates(RankSizes.of(shape, 2, 0), 2560) if "interleaved" in tiles.schedules]


@parametrize("link", ["none", "1us", "5us", "5us,no-pdl", "20us"])
@parametrize("hidden", [1024, 2048])
@parametrize("which", [0, 1, 2])
def test_reading_before_waiting_changes_no_bit(link: str, hidden: int, which: int) -> None:
    # gate/up's programs have several blocks each, the first ones more
    shape = replace(SHAPE, num_layers=12, hidden_size=hidden, intermediate_size=28672)
    tiles = interleaved_tiles(shape)[which]
    sizes, gate_up = RankSizes.of(shape, 2, 0), tiles.gate_up
    blocks, most = 2 * sizes.intermediate // gate_up.rows, gate_up.programs_per_sm * sm_count(torch.device("cuda"))
    assert blocks > 2 * most or not gate_up.programs_per_sm
    # the other has QKV with split-K: only gate/up reads before it waits
    assert bool(tiles.qkv.programs_per_sm) == ((hidden, which) != (2048, 2))
    waiting = logits_of_steps(shape, link, tiles, reads_before_wait=False)
    assert torch.isfinite(waiting).all()
    assert torch.equal(waiting, logits_of_steps(shape, link, tiles, reads_before_wait=True))


if __name__ == "__main__":
    sys.exit(main(tests=dict(globals())))
