"""Weights under the names and in the shapes that a loaded rank really has."""

from __future__ import annotations

import pytest
from transformers import LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM

from ladder_residual.engine.quantized import rounded
from ladder_residual.engine.spec import EngineSpec, RankSizes
from ladder_residual.engine.weights import check_weights_stack


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
    weights = {name: parameter.data for name, parameter in model.named_parameters()}
    check_weights_stack(spec, sizes, weights)
    norm = weights.pop("model.norm.weight")
    with pytest.raises(ValueError, match="lacks model.norm.weight"):
        check_weights_stack(spec, sizes, weights)
    key = "model.layers.0.self_attn.k_proj.weight"
    mixed = weights | {"model.norm.weight": norm, key: rounded(weights[key], "fp8")}
    with pytest.raises(ValueError, match="weights that one kernel reads differ .* use --engine torch"):
        check_weights_stack(spec, sizes, mixed)
