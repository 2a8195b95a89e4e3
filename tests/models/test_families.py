"""Every family against transformers' own class and against the recurrence followed by hand."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from ladder_residual import rewire
from ladder_residual.core.config import Wiring
from ladder_residual.models.convert import convert
from ladder_residual.models.families import FAMILIES, check_wiring, family_of
from ladder_residual.models.hf_config import ladder_config_class
from ladder_residual.models.loading import load_model
from tests.tiny_models import (
    FAMILY_NAMES,
    LAYERS,
    clone,
    head_logits,
    layer_inputs,
    oracle_logits,
    padded_inputs,
    random_ids,
    tiny_config,
    tiny_model,
)


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_standard_equals_transformers_bit_for_bit(family):
    model, inputs = tiny_model(family), padded_inputs()
    with torch.no_grad():
        expected = model(**inputs).logits
        found = rewire(clone(model), "standard")(**inputs).logits
    assert torch.equal(found, expected)


@pytest.mark.parametrize("spec", ["ladder", "ladder:last-half", "ladder:0,2"])
@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_ladder_equals_the_recurrence(family, spec):
    model, inputs = tiny_model(family), padded_inputs()
    layers = Wiring.parse(spec, LAYERS).layers
    expected = oracle_logits(model, layers, **inputs)
    rewired = rewire(clone(model), spec)
    real = inputs["attention_mask"].bool()
    with torch.no_grad():
        found = rewired(**inputs).logits
        torch.testing.assert_close(found[real], expected[real], rtol=1e-5, atol=1e-5)
        # The wiring must matter, or the comparison above proves nothing.
        assert (found - model(**inputs).logits)[real].abs().max() > 1e-3
        # Cached decode: the prompt, then token by token.
        step = rewired(inputs["input_ids"][:, :4], attention_mask=inputs["attention_mask"][:, :4], use_cache=True)
        logits = [step.logits]
        for position in range(4, inputs["input_ids"].shape[1]):
            step = rewired(
                inputs["input_ids"][:, position : position + 1],
                attention_mask=inputs["attention_mask"][:, : position + 1],
                past_key_values=step.past_key_values,
                use_cache=True,
            )
            logits.append(step.logits)
    torch.testing.assert_close(torch.cat(logits, 1)[real], expected[real], rtol=1e-4, atol=1e-4)


def test_the_oracle_without_ladder_layers_is_transformers():
    for family in FAMILY_NAMES:
        model, inputs = tiny_model(family), {"input_ids": random_ids()}
        with torch.no_grad():
            torch.testing.assert_close(oracle_logits(model, (), **inputs), model(**inputs).logits)


@pytest.mark.parametrize("family", ["llama", "granite", "phi3", "gpt_neox", "mixtral"])
def test_parallel_layers_have_one_norm(family):
    fields = {key: value for key, value in tiny_config(family).to_dict().items() if key != "model_type"}
    model = AutoModelForCausalLM.from_config(ladder_config_class(family)(**fields | {"wiring": "parallel"})).eval()
    row = FAMILIES[family]
    assert not any(f".{row.mlp_norm}." in name for name, _ in model.named_parameters())
    with torch.no_grad():
        x, kwargs = layer_inputs(model, input_ids=random_ids())
        for index, layer in enumerate(model.base_model.layers):
            scale = getattr(layer, row.multiplier) if row.multiplier else 1.0
            normed = getattr(layer, row.attention_norm)(x)
            x = x + (getattr(layer, row.attention)(normed, **kwargs[index])[0] + getattr(layer, row.mlp)(normed)) * scale
        norm = getattr(model.base_model, "norm", None) or model.base_model.final_layer_norm
        torch.testing.assert_close(model(random_ids()).logits, head_logits(model, norm(x)), rtol=1e-5, atol=1e-5)


def test_families_that_cannot_be_rewired_say_why():
    for config, reason in [
        ({"model_type": "phi"}, "read the same input"),
        ({"model_type": "cohere"}, "read the same input"),
        ({"model_type": "gpt_neox"}, "use_parallel_residual"),
        ({"model_type": "llamma"}, "did you mean 'llama'"),
        ({"model_type": "bert"}, "unknown family"),
        (
            {"model_type": "mystery", "auto_map": {"AutoModel": "m.M"}},
            "Python code of its own (auto_map), which is never run here",
        ),
        ({}, "no usable model_type"),
        ({"model_type": 3}, "no usable model_type"),
    ]:
        with pytest.raises(ValueError, match=".*") as caught:
            family_of(config)
        assert reason in str(caught.value)


@pytest.mark.parametrize("spec", ["parallel", "desync-2x", "delayed-1"])
def test_post_norm_families_refuse_wirings_that_add_partials(spec):
    for family in ("gemma2", "gemma3_text", "olmo2", "olmo3"):
        with pytest.raises(ValueError, match="norms a module's output first"):
            check_wiring(FAMILIES[family], Wiring.parse(spec, 4))
    check_wiring(FAMILIES["llama"], Wiring.parse(spec, 4))


def test_rewire_refuses_what_does_not_fit():
    model = tiny_model("llama")
    with pytest.raises(ValueError, match="layer 40"):
        rewire(model, "ladder:40")
    with pytest.raises(ValueError, match="one norm"):
        rewire(model, "parallel")
    fields = {key: value for key, value in tiny_config("llama").to_dict().items() if key != "model_type"}
    one_norm = AutoModelForCausalLM.from_config(ladder_config_class("llama")(**fields | {"wiring": "parallel"}))
    for spec in ("standard", "parallel:0", "ladder"):
        with pytest.raises(ValueError, match="one norm"):
            rewire(one_norm, spec)
    with pytest.raises(ValueError, match="can rewire a LlamaForCausalLM, got LlamaModel"):
        rewire(model.model, "ladder")


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_a_plain_checkpoint_as_transformers_writes_it_loads_and_converts(family, tmp_path):
    """Some families store weights under other names than their parameters have (experts, gpt_neox's head)."""
    model, ids = tiny_model(family), random_ids()
    model.save_pretrained(tmp_path / "plain")
    convert(tmp_path / "plain", tmp_path / "ladder", "ladder:last-half")
    with torch.no_grad():
        expected = model(ids).logits
        assert torch.allclose(load_model(tmp_path / "plain")(ids).logits, expected, atol=1e-5)
        rewired = rewire(model, "ladder:last-half")(ids).logits
        for loaded in (load_model(tmp_path / "ladder"), AutoModelForCausalLM.from_pretrained(tmp_path / "ladder")):
            assert torch.allclose(loaded(ids).logits, rewired, atol=1e-5)
