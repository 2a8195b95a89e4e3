"""Weights under the names and in the shapes that a loaded rank really has."""

from __future__ import annotations

import pytest
from transformers import LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM

from ladder_residual.engine.spec import EngineSpec, RankSizes
from ladder_residual.engine.weights import check_shapes


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", [LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM])
def test_weights_of_transformers_models_are_taken(kind, tied: bool) -> None:
    model = kind(
        kind.config_class(
            vocab_size=96, hidden_size=128, intermediate_size=192, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, head_dim=64, tie_word_embeddings=tied,
        )
    )  # fmt: skip
    spec = EngineSpec.from_hf(model.config.to_dict())
    sizes = RankSizes.of(spec.shape, 1, 0)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    check_shapes(spec, sizes, shapes)
    del shapes["model.norm.weight"]
    with pytest.raises(ValueError, match="lacks model.norm.weight"):
        check_shapes(spec, sizes, shapes)
