"""The peers of the CUDA engine compute the same, and stand beside our rows."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from lab.peers.measure import Peers
from lab.peers.plain import PlainDecoder
from lab.peers.transformers_models import transformers_model
from ladder_residual.core.config import Wiring
from ladder_residual.engine.spec import EngineSpec, RankSizes
from ladder_residual.engine.weights import random_weights, stack_weights
from ladder_residual.models.presets import ModelShape
from tests.engine.reference import ReferenceDecoder

PEER_SHAPE = ModelShape(
    family="llama", hidden_size=64, intermediate_size=96, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=64, vocab_size=97
)  # fmt: skip


@pytest.mark.parametrize("tp", [1, 2])
def test_the_plain_peer_computes_what_the_slow_twin_does(tp: int) -> None:
    """A peer that computed something else would be no peer. With tp=2: rank 1 alone, whose all-reduces return its own partial."""
    spec, sizes = EngineSpec.from_shape(PEER_SHAPE), RankSizes.of(PEER_SHAPE, tp, tp - 1)
    weights = stack_weights(spec, sizes, random_weights(spec, tp, tp - 1, torch.float32, "cpu"))
    reduces: list[int] = []
    alone = None if tp == 1 else lambda partial: reduces.append(1) or partial.clone()
    peer = PlainDecoder(spec, sizes, weights, batch=3, max_context=8, all_reduce=alone)
    reference = ReferenceDecoder(spec, Wiring.parse("standard", 3), [weights], tp=tp, first_rank=tp - 1)
    for tokens in torch.randint(0, 97, (5, 3), generator=torch.Generator().manual_seed(4)):
        torch.testing.assert_close(peer.step(tokens), reference.forward(tokens[:, None])[:, 0], rtol=1e-4, atol=1e-5)
    assert len(reduces) == (0 if tp == 1 else 5 * (1 + 2 * 3))
    prompts = torch.randint(0, 97, (3, 4), generator=torch.Generator().manual_seed(5))
    reference = ReferenceDecoder(spec, Wiring.parse("standard", 3), [weights], tp=tp, first_rank=tp - 1)
    torch.testing.assert_close(peer.prompt(prompts), reference.forward(prompts)[:, -1], rtol=1e-4, atol=1e-5)
    for tokens in torch.randint(
        0, 97, (3, 3), generator=torch.Generator().manual_seed(6)
    ):  # over what the first text left behind
        torch.testing.assert_close(peer.step(tokens), reference.forward(tokens[:, None])[:, 0], rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="not that of qwen3"):
        PlainDecoder(EngineSpec.from_shape(replace(PEER_SHAPE, family="qwen3")), sizes, weights, batch=1, max_context=8)


@pytest.mark.parametrize("tied", [False, True])
def test_transformers_is_compared_with_the_same_weights(tied: bool) -> None:
    shape = replace(PEER_SHAPE, tied_embeddings=tied)
    scaled = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
              "original_max_position_embeddings": 64}  # fmt: skip
    spec, sizes = EngineSpec.from_shape(shape, rope_scaling=scaled), RankSizes.of(shape, 1, 0)
    weights = stack_weights(spec, sizes, random_weights(spec, 1, 0, torch.float32, "cpu"))
    model = transformers_model(spec, weights)
    reference = ReferenceDecoder(spec, Wiring.parse("standard", 3), [weights], tp=1)
    tokens = torch.randint(0, 97, (2, 9), generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        torch.testing.assert_close(model(tokens).logits, reference.forward(tokens), rtol=1e-4, atol=1e-5)
    own = {tensor.data_ptr() for tensor in (weights.embedding, weights.layers[1].qkv, weights.layers[2].gate_up)}
    assert own <= {parameter.data_ptr() for parameter in model.parameters()}  # views, not copies
    with pytest.raises(ValueError, match="not on qwen2"):
        transformers_model(EngineSpec.from_shape(replace(shape, family="qwen2")), weights)


def test_peers_stand_beside_our_rows_and_their_failures_are_named(capsys) -> None:
    peers = Peers(SimpleNamespace(tp=1))

    def fails() -> dict:
        raise RuntimeError("no compiler")

    peers.attempt("transformers", lambda: {"batch": 1, "link": "none", "engine": "transformers", "ms": 30.0})
    peers.attempt("transformers", fails)
    found = peers.beside({"rows": [{"batch": 1, "link": "none", "wiring": "standard", "ms": 20.0}]}, "ms")
    assert found["peers"][0]["over_ours"] == 1.5
    assert found["peers_failed"] == {"transformers": "RuntimeError"}
    assert "transformers failed: RuntimeError: no compiler" in capsys.readouterr().err
    shared = Peers(SimpleNamespace(tp=8))
    shared.e2e("24us", batch=1, prompt=8, new=8, repeats=1)  # no weights here, so the compiled blocks do not run
    assert not shared.rows
    assert list(shared.failed) == ["compiled blocks in one CUDA graph"]  # transformers is no peer of one rank of several
