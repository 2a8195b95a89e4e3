"""Which architecture a config gets; no engine is started here."""

from __future__ import annotations

import pytest
from transformers import AutoConfig

from ladder_residual.vllm_plugin.routing import route


def test_a_wiring_inside_a_part_of_the_config_is_not_ignored() -> None:
    text = {"num_hidden_layers": 4}
    plain = AutoConfig.for_model("gemma3", text_config=text)
    route(plain)
    rewired = AutoConfig.for_model("gemma3", text_config=text | {"wiring": "ladder:last-half"})
    rewired.architectures = ["Gemma3ForConditionalGeneration"]
    with pytest.raises(
        ValueError, match="text_config asks for wiring ladder:2-3, which Gemma3ForConditionalGeneration would ignore"
    ):
        route(rewired)
    nested = AutoConfig.for_model("llama", some_config={"inner": text | {"wiring": "desync-2x"}})
    with pytest.raises(ValueError, match="inner asks for wiring desync-2x"):
        route(nested)
