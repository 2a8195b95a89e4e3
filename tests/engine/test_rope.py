"""Rotary embeddings are those of transformers."""

from __future__ import annotations

import pytest
import torch

from ladder_residual.engine.rope import rope_tables
from ladder_residual.engine.spec import EngineSpec


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 10_000.0},
        {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0},
        {
            "rope_type": "llama3", "rope_theta": 500_000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ],
    ids=lambda rope: rope["rope_type"],
)  # fmt: skip
def test_rope_tables_are_those_of_transformers(rope) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = LlamaConfig(
        hidden_size=256, intermediate_size=512, num_hidden_layers=1, num_attention_heads=4, vocab_size=9, rope_parameters=rope,
        max_position_embeddings=512,
    )  # fmt: skip
    cos, sin = rope_tables(EngineSpec.from_hf(config.to_dict()), 300, "cpu")
    expected = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(300)[None])
    torch.testing.assert_close(cos, expected[0][0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(sin, expected[1][0], rtol=1e-4, atol=1e-4)
