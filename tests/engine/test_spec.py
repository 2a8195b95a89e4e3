"""Sizes of a rank, and which models the engine can compute."""

from __future__ import annotations

import pytest

from ladder_residual.engine.spec import EngineSpec, RankSizes
from ladder_residual.models.presets import ModelShape


def test_bytes_of_the_70b_shard() -> None:
    """17.4 GB a step, as counted by hand: 80 layers of QKV 1280x8192, output, gate/up 7168x8192, down, and 16032 rows of head."""
    sizes = RankSizes.of(ModelShape.from_name("llama-3-70b"), 8, 0)
    layer = 1280 * 8192 + 8192 * 1024 + 7168 * 8192 + 8192 * 3584 + 2 * 8192
    assert sizes.weight_bytes(2) == 2 * (80 * layer + 16032 * 8192 + 8192)
    assert sizes.cache_bytes(2, 1, 1280) == 2 * 2 * 80 * 1280 * 128


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"head_dim": 80}, "head size 80 is not one of"),
        ({"family": "bloom"}, "not 'bloom'"),
        ({"num_heads": 7}, "7 heads do not divide into 8 KV heads"),
    ],
)
def test_models_the_engine_cannot_take(change: dict, message: str) -> None:
    shape = ModelShape(**{**ModelShape.from_name("llama-3.1-8b").to_dict(), **change})
    with pytest.raises(ValueError, match=message):
        EngineSpec.from_shape(shape)


def test_ranks_that_do_not_divide() -> None:
    with pytest.raises(ValueError, match="num_heads=32 does not divide into tp=3"):
        RankSizes.of(ModelShape.from_name("llama-3.1-8b"), 3, 0)
    assert RankSizes.of(ModelShape.from_name("llama-3.1-405b"), 16, 3).kv_heads == 1  # replicated


def test_rope_types() -> None:
    config = {"model_type": "llama", "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1, "num_attention_heads": 4,
              "vocab_size": 9, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}  # fmt: skip
    with pytest.raises(ValueError, match="rope type 'yarn'"):
        EngineSpec.from_hf(config)
    with pytest.raises(ValueError, match="sliding_window=4096"):
        EngineSpec.from_hf({**config, "rope_scaling": None, "sliding_window": 4096})


@pytest.mark.parametrize(
    ("change", "context", "message"),
    [
        ({"hidden_act": "gelu"}, 64, "hidden_act='gelu': the CUDA engine computes silu"),
        ({"sliding_window": 4096}, 4097, "takes at most 4096 tokens, not 4097"),
        ({"sliding_window": 4096}, None, "takes at most 4096 tokens"),
        ({"sliding_window": 4096}, 4096, None),
        ({"sliding_window": 4096, "use_sliding_window": False}, 9000, None),
    ],
)
def test_what_a_config_asks_for_is_computed_or_refused(change: dict, context: int | None, message: str | None) -> None:
    config = {"model_type": "mistral", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 64,
              "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 96, **change}  # fmt: skip
    if message is None:
        assert EngineSpec.from_hf(config, max_context=context).shape.num_layers == 2
        return
    with pytest.raises(ValueError, match=message):
        EngineSpec.from_hf(config, max_context=context)
