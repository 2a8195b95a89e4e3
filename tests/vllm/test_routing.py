"""Which architecture a config gets; no engine is started here."""

from __future__ import annotations

from typing import Any

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
    listed = AutoConfig.for_model("llama", stages=[{"name": "first"}, text | {"wiring": "ladder"}])
    with pytest.raises(ValueError, match="stages asks for wiring ladder"):
        route(listed)
    authors = AutoConfig.for_model("llama", text_config=text | {"model_type": "some_text", "ladder_layers": 2})
    with pytest.raises(ValueError, match="text_config asks for wiring ladder:2-3"):
        route(authors)


@pytest.mark.parametrize(
    "own", [{"wiring": {"kind": "ladder"}}, {"wiring": ["a", "b"]}, {"wiring": 3}, {"ladder_layers": "some"}]
)
def test_a_field_of_this_name_that_says_something_else_is_another_models(own: dict[str, Any]) -> None:
    for depth in ({"num_hidden_layers": 4}, {}):
        config = AutoConfig.for_model("llama", vision_config={"model_type": "some_vision"} | depth | own)
        config.architectures = ["SomeModel"]
        route(config)
        assert config.architectures == ["SomeModel"]
