"""Compiled layers and the chunked loss, each against its slow twin."""

import pytest
import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from ladder_residual import rewire
from ladder_residual.hf_config import ladder_config_class
from ladder_residual.loading import set_reducers, shard_model
from ladder_residual.parallel import finish_gradients
from ladder_residual.train.compiling import compile_blocks
from ladder_residual.train.loss import chunked_cross_entropy, head_of
from ranks import run_on_ranks
from tiny_models import VOCAB, clone, random_ids, tiny_config, tiny_model

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
    compiled = compile_blocks(rewire(tiny_model(family), "standard").train())
    for spec in WIRINGS if family == "llama" else ["ladder"]:
        if spec == "parallel":  # has one norm a layer, so it does not share weights with the others
            eager = fresh_parallel_model(family)
            model = compile_blocks(clone(eager))
        else:
            eager, model = rewire(tiny_model(family), spec).train(), rewire(clone(compiled), spec)
        loss, found = gradients(model)
        expected_loss, expected = gradients(eager)
        assert torch.allclose(loss, expected_loss, rtol=1e-5), spec
        assert worst(found, expected) < 1e-4, spec
        # Attention and MLP once each, for all layers and wirings; the parallel layer's two in one.
        assert stats["unique_graphs"] == 2 + (WIRINGS.index(spec) >= WIRINGS.index("parallel")) * (family == "llama"), spec


def test_plain_model_gradient_checkpointing_and_generation():
    stats = fresh_counters()
    teacher = tiny_model("llama")
    expected = teacher(**INPUTS).logits
    found = compile_blocks(clone(teacher))(**INPUTS).logits
    assert torch.allclose(found, expected, atol=1e-5)
    assert stats["unique_graphs"] == 1  # the layers of a plain model share one code too

    model = rewire(tiny_model("llama"), "ladder").train()
    _, expected = gradients(model)
    compile_blocks(model).gradient_checkpointing_enable()
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
        (loss, found), (expected_loss, expected) = gradients(compile_blocks(model)), gradients(eager)
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
        compile_blocks(model, shared=True)  # one compilation for all of them
        _, found = gradients(model, world)
        with torch.no_grad():
            errors[spec, "logits"] = (model(**INPUTS).logits - logits).abs().max().item()
        errors[spec, "gradients"] = worst(found, expected)
    return errors


def test_compiled_ranks_equal_eager_ranks():
    for errors in run_on_ranks(2, compiled_on_ranks):
        assert max(errors.values()) < 2e-4, errors


def plain_loss(logits, labels, z_loss=0.0):
    logits, targets = logits[:, :-1].reshape(-1, logits.shape[-1]), labels[:, 1:].reshape(-1)
    entropy = F.cross_entropy(logits, targets, ignore_index=-100)
    normaliser = logits.logsumexp(-1)[targets != -100]
    return entropy + z_loss * normaliser.square().mean(), entropy


@pytest.mark.parametrize("family", ["llama", "granite", "gemma2"])  # plain, scaled, soft-capped logits
@pytest.mark.parametrize(("chunk", "z_loss"), [(5, 0.0), (4096, 0.1)])
def test_chunked_loss_equals_the_plain_one(family, chunk, z_loss):
    labels = random_ids(3, 9).masked_fill(random_ids(3, 9, seed=5) < 30, -100)
    model = tiny_model(family)
    expected, entropy = plain_loss(model(INPUTS["input_ids"]).logits, labels, z_loss)
    (3 * expected).backward()
    wanted = {name: parameter.grad for name, parameter in model.named_parameters()}
    twin = clone(model)
    twin.zero_grad()
    hidden = twin.base_model(INPUTS["input_ids"]).last_hidden_state
    found = chunked_cross_entropy(hidden, head_of(twin), labels, chunk=chunk, z_loss=z_loss)
    (3 * found.total).backward()
    assert torch.allclose(found.total, expected, rtol=1e-5)
    assert torch.allclose(found.cross_entropy, entropy, rtol=1e-5)
    assert worst({name: parameter.grad for name, parameter in twin.named_parameters()}, wanted) < 2e-5
    with torch.no_grad():
        assert torch.allclose(chunked_cross_entropy(hidden, head_of(twin), labels).cross_entropy, entropy, rtol=1e-5)


def test_chunked_loss_compiled():
    hidden, weight = torch.randn(2, 9, 16, requires_grad=True), torch.randn(VOCAB, 16, requires_grad=True)
    model = tiny_model("llama")
    results = []
    for compiled in (False, True):
        loss = chunked_cross_entropy(
            hidden, head_of(model)._replace(weight=weight), random_ids(2, 9), compiled=compiled, z_loss=0.01
        )
        results.append((loss.total.detach(), *torch.autograd.grad(loss.total, (hidden, weight))))
    for found, expected in zip(*results, strict=True):
        assert torch.allclose(found, expected, rtol=1e-4, atol=1e-6)


def chunked_on_ranks(world):
    whole = rewire(tiny_model("llama", tie_word_embeddings=False), "ladder")
    labels = random_ids(3, 9).masked_fill(random_ids(3, 9, seed=5) < 30, -100)
    expected, _ = plain_loss(whole(INPUTS["input_ids"]).logits, labels)
    expected.backward()
    model = shard_model(clone(whole), world)
    found = chunked_cross_entropy(model.base_model(INPUTS["input_ids"]).last_hidden_state, head_of(model), labels, chunk=7)
    found.total.backward()
    finish_gradients(model, world)
    wanted = {}
    for name, parameter in whole.named_parameters():
        cut = model.tensor_parallel_cuts[name]
        parts = [parameter.grad.narrow(cut.dim, a, b - a) for a, b in cut.ranges] if cut else [parameter.grad]
        wanted[name] = torch.cat(parts, cut.dim) if cut else parts[0]
    error = worst({name: parameter.grad for name, parameter in model.named_parameters()}, wanted)
    return abs(found.total.item() - expected.item()), error


def test_chunked_loss_with_the_vocabulary_cut_over_ranks():
    for loss, gradient in run_on_ranks(2, chunked_on_ranks):
        assert loss < 1e-5
        assert gradient < 2e-4


def test_a_chunk_has_at_least_one_token():
    with pytest.raises(ValueError, match="at least 1 token, got 0"):
        chunked_cross_entropy(torch.zeros(1, 2, 4), head_of(tiny_model("llama")), random_ids(1, 2), chunk=0)
