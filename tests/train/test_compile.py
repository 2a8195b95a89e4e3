"""Compiled layers against eager ones."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from ladder_residual import rewire
from ladder_residual.models.hf_config import ladder_config_class
from ladder_residual.models.loading import set_reducers
from ladder_residual.train.compile import compile_layers
from ladder_residual.train.gradients import finish_gradients
from tests.ranks import run_on_ranks
from tests.tiny_models import clone, random_ids, shard_model, tiny_config, tiny_model

pytestmark = pytest.mark.slow  # the compiler takes minutes on two cores
INPUTS = dict(input_ids=random_ids(3, 9), labels=random_ids(3, 9), use_cache=False)
WIRINGS = ["standard", "ladder", "ladder:last-half", "parallel", "desync-2x", "delayed-1"]


def gradients(model, world=None):
    model.zero_grad()
    loss = model(**INPUTS).loss
    loss.backward()
    if world:
        finish_gradients(model, world)
    return loss.detach(), {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def worst(found, expected):
    return max(((found[name] - expected[name]).norm() / expected[name].norm().clamp_min(1e-7)).item() for name in expected)


def fresh_counters():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    return torch._dynamo.utils.counters["stats"]


def fresh_parallel_model(family):
    fields = {key: value for key, value in tiny_config(family).to_dict().items() if key != "model_type"}
    return AutoModelForCausalLM.from_config(ladder_config_class(family)(**fields, wiring="parallel")).train()


@pytest.mark.parametrize("family", ["llama", pytest.param("granite", marks=pytest.mark.slow)])
def test_compiled_layers_equal_eager_ones_for_every_wiring(family):
    """One compilation serves all wirings that share weights: the models share their compiled functions here."""
    stats = fresh_counters()
    compiled = compile_layers(rewire(tiny_model(family), "standard").train())
    for spec in WIRINGS if family == "llama" else ["ladder"]:
        if spec == "parallel":  # has one norm a layer, so it does not share weights with the others
            eager = fresh_parallel_model(family)
            model = compile_layers(clone(eager))
        else:
            eager, model = rewire(tiny_model(family), spec).train(), rewire(clone(compiled), spec)
        loss, found = gradients(model)
        expected_loss, expected = gradients(eager)
        assert torch.allclose(loss, expected_loss, rtol=1e-5), spec
        assert worst(found, expected) < 1e-4, spec
        # Attention and MLP once each, for all layers and wirings; the parallel layer's two in one.
        assert stats["unique_graphs"] == 2 + (WIRINGS.index(spec) >= WIRINGS.index("parallel")) * (family == "llama"), spec


def test_teacher_gradient_checkpointing_and_generation():
    stats = fresh_counters()
    teacher = tiny_model("llama")
    expected = teacher(**INPUTS).logits
    with pytest.raises(ValueError, match="rewire the model first, with wiring standard to change nothing"):
        compile_layers(clone(teacher))
    found = compile_layers(rewire(clone(teacher), "standard"))(**INPUTS).logits
    assert torch.allclose(found, expected, atol=1e-5)
    assert stats["unique_graphs"] == 2

    model = rewire(tiny_model("llama"), "ladder").train()
    _, expected = gradients(model)
    compile_layers(model).gradient_checkpointing_enable()
    assert worst(gradients(model)[1], expected) < 1e-4

    model.eval()
    plain = rewire(tiny_model("llama"), "ladder")
    greedy = dict(max_new_tokens=5, do_sample=False, pad_token_id=0)
    assert torch.equal(model.generate(random_ids(2, 5), **greedy), plain.generate(random_ids(2, 5), **greedy))


@pytest.mark.parametrize("convert", ["weights", pytest.param("autocast", marks=pytest.mark.slow)])
def test_compiled_in_bfloat16(convert):
    model = rewire(tiny_model("llama"), "ladder").train()
    model = model.to(torch.bfloat16) if convert == "weights" else model
    eager = clone(model)
    with torch.autocast("cpu", torch.bfloat16, enabled=convert == "autocast"):
        (loss, found), (expected_loss, expected) = gradients(compile_layers(model)), gradients(eager)
    assert torch.allclose(loss.float(), expected_loss.float(), rtol=2e-2)
    assert worst(found, expected) < 0.2, convert


def compiled_on_ranks(world):
    """Late waits are what Inductor gets wrong when it sees them: compiled ranks against eager ranks, with and without gradients."""
    errors = {}
    for spec in ("standard", "ladder", "desync-2x", "delayed-1"):
        model = rewire(tiny_model("llama", num_hidden_layers=6), spec).train()
        shard_model(model, world)
        set_reducers(model, world.reducer("async", latency=1e-3))
        _, expected = gradients(model, world)
        with torch.no_grad():
            logits = model(**INPUTS).logits
        compile_layers(model, shared=True)  # one compilation for all of them
        _, found = gradients(model, world)
        with torch.no_grad():
            errors[spec, "logits"] = (model(**INPUTS).logits - logits).abs().max().item()
        errors[spec, "gradients"] = worst(found, expected)
    return errors


def test_compiled_ranks_equal_eager_ranks():
    for errors in run_on_ranks(2, compiled_on_ranks):
        assert max(errors.values()) < 2e-4, errors
