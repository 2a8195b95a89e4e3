"""A woven line whose products do not wait before they read: on a real GPU, bit for bit what the waiting line computes.
``python tests/gpu/test_woven_gpu.py`` runs it without pytest."""

from __future__ import annotations

import sys
from dataclasses import replace
from unittest.mock import patch

import torch
from test_engine_gpu import SHAPE, main, parametrize

from ladder_residual.config import Wiring
from ladder_residual.engine import DecodeEngine, EngineSpec, RankSizes, decoder, parse_link, random_weights, stack_weights
from ladder_residual.engine.gemv_ops import GemvTiles

try:
    import pytest

    pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
except ImportError:  # a bare machine
    pass

DEEP = replace(SHAPE, num_layers=12)
STEPS = 60


def logits_of_steps(link: str, tiles: GemvTiles, reads_behind: bool) -> tuple[torch.Tensor, int]:
    """Of many steps, and how many edges of the graph were changed for them."""
    spec, sizes, wiring = EngineSpec.from_shape(DEEP), RankSizes.of(DEEP, 2, 0), Wiring.parse("ladder", DEEP.num_layers)
    torch.manual_seed(5)
    weights = stack_weights(spec, sizes, random_weights(spec, 2, 0, torch.bfloat16, "cuda"))
    tokens = torch.randint(0, sizes.vocab_tokens, (STEPS,), device="cuda")
    changed = []

    def change(*given) -> None:
        changed.append(wait_for_joined(*given))

    wait_for_joined = decoder.wait_for_joined
    with patch.object(decoder, "can_change_edges", lambda: reads_behind), patch.object(decoder, "wait_for_joined", change):
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
    torch.manual_seed(6)
    engine.reset(1000, random_context=True)
    return torch.stack([engine.decode(tokens[step : step + 1]).clone() for step in range(STEPS)]), sum(changed)


@parametrize("link", ["none", "1us", "5us", "5us+launch", "20us"])
@parametrize("which", [0, 1])
def test_reading_behind_changes_no_bit(link: str, which: int) -> None:
    """The second set of tiles has a QKV product that cannot read behind, so only gate/up does."""
    sets = GemvTiles.candidates(RankSizes.of(DEEP, 2, 0), 2560)
    tiles = [tiles for tiles in sets if "woven" in tiles.schedules][which]
    waiting, unchanged = logits_of_steps(link, tiles, reads_behind=False)
    behind, changed = logits_of_steps(link, tiles, reads_behind=True)
    assert torch.isfinite(waiting).all()
    assert torch.equal(waiting, behind)
    joins = DEEP.num_layers - 1 if tiles.qkv.walkers else 0  # QKV joins the attention of the layer before, or its sum
    assert (unchanged, changed) == (0, joins)


if __name__ == "__main__":
    sys.exit(main(tests=dict(globals())))
