"""What ``ladder inspect`` counts."""

import pytest

from ladder_residual import rewire
from ladder_residual.models.families import FAMILIES
from ladder_residual.models.hf import ladder_classes
from ladder_residual.models.inspect import inspect_checkpoint
from tests.tiny_models import tiny_config, tiny_model


def test_inspect_counts_exactly(tmp_path):
    rewire(tiny_model("qwen3"), "ladder:1,3").save_pretrained(tmp_path / "ladder")
    found = inspect_checkpoint(tmp_path / "ladder")
    assert (found["family"], found["wiring"], found["picture"]) == ("qwen3", "ladder:1,3", "|#|#")
    whole = sum(p.numel() for p in tiny_model("qwen3").parameters())
    assert found["parameters"] == whole
    assert found["ranks"][1]["weight_bytes"] == 4 * whole
    assert found["ranks"][2]["weight_bytes"] < 0.6 * 4 * whole
    assert "does not divide" in found["ranks"][3]["refused"]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_headers_say_what_the_model_has(tmp_path, family):
    """Its slow twin: the family's own model, built."""
    model = tiny_model(family)
    model.save_pretrained(tmp_path)
    assert inspect_checkpoint(tmp_path)["parameters"] == sum(p.numel() for p in model.parameters())


def test_parallel_layers_have_a_norm_less(tmp_path):
    config_class, model_class = ladder_classes("llama")
    sizes = (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
    )
    given = {name: getattr(tiny_config("llama"), name) for name in sizes}
    model = model_class(config_class(**given, wiring="parallel:1-2"))
    model.save_pretrained(tmp_path)
    assert inspect_checkpoint(tmp_path)["parameters"] == sum(p.numel() for p in model.parameters())
