"""The reference itself: ranks that add up to one, and wirings that differ."""

from __future__ import annotations

import pytest
import torch

from ladder_residual.core.config import Wiring
from ladder_residual.engine.spec import EngineSpec, RankSizes
from ladder_residual.engine.weights import random_weights, stack_weights
from ladder_residual.models.sharding import split
from tests.engine.reference import ReferenceDecoder
from tests.engine.tiny import LAYERS, SHAPE, random_tokens, tiny_rank


@pytest.mark.parametrize("wiring", ["ladder", "parallel", "desync-2x", "no-comm", "ladder:3-5"])
def test_wirings_differ_from_standard(wiring: str) -> None:
    """If they did not, comparing a schedule with the reference would prove nothing."""
    tokens = random_tokens(SHAPE, 2, 4)
    spec, _, weights = tiny_rank(SHAPE, 2, 0)
    standard, other = (
        ReferenceDecoder(spec, Wiring.parse(name, LAYERS), [weights], tp=2).forward(tokens) for name in ("standard", wiring)
    )
    differs = (standard - other).norm() / standard.norm() > 1e-2
    assert differs == (wiring != "no-comm")  # one shard alone: nothing is lost without all-reduces


@pytest.mark.parametrize("wiring", ["standard", "ladder", "parallel", "ladder:2-4"])
def test_all_ranks_equal_one_rank(wiring: str) -> None:
    """The shards of tp=2 give the model of tp=1: slices of the same weights."""
    spec = EngineSpec.from_shape(SHAPE)
    whole = random_weights(spec, 1, 0, torch.float32, "cpu")

    def decoder(tp: int) -> ReferenceDecoder:
        shards = [
            stack_weights(spec, RankSizes.of(SHAPE, tp, rank), shard(whole, rank, tp)) for rank in range(tp)
        ]  # fmt: skip
        return ReferenceDecoder(spec, Wiring.parse(wiring, LAYERS), shards, tp=tp)

    tokens = random_tokens(SHAPE, 2, 5)
    one, two = decoder(1), decoder(2)
    for new in (tokens, tokens[:, :1]):
        torch.testing.assert_close(two.forward(new)[..., : SHAPE.vocab_size], one.forward(new), rtol=1e-4, atol=1e-5)


def shard(whole: dict[str, torch.Tensor], rank: int, tp: int) -> dict[str, torch.Tensor]:
    out = {}
    for name, tensor in whole.items():
        if any(key in name for key in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")):
            out[name] = tensor.chunk(tp, dim=0)[rank]
        elif "o_proj" in name or "down_proj" in name:
            out[name] = tensor.chunk(tp, dim=1)[rank]
        elif "embed" in name or "lm_head" in name:
            out[name] = tensor[slice(*split(tensor.shape[0], tp, rank))]
        else:
            out[name] = tensor
    return out
