"""Which engine computes."""

from __future__ import annotations

import pytest
import torch

from ladder_residual.distributed.world import EmulatedRank
from ladder_residual.generation.engine_choice import with_engine
from ladder_residual.links import parse_link
from ladder_residual.models.loading import load_model


def test_an_emulated_rank_holds_the_first_shard(demo_dir):
    """What `generate --emulate` hands to the engine: rank 0's weights, with nobody else there."""
    shard, whole = load_model(demo_dir, EmulatedRank(2)), load_model(demo_dir)
    parts, all_of = dict(shard.named_parameters()), dict(whole.named_parameters())
    for name, rows in (("model.layers.1.mlp.gate_proj.weight", 0), ("model.layers.1.self_attn.o_proj.weight", 1)):
        torch.testing.assert_close(parts[name], all_of[name].chunk(2, dim=rows)[0])
    with pytest.raises(ValueError, match="--emulate needs the CUDA engine and a GPU"):
        with_engine(shard, EmulatedRank(2), "auto", batch=1, context=64, beams=1, schedule="auto", link=parse_link("24us"))
