"""Several ranks computed by one process, against the oracle that simulates ranks without any of the sharding code."""

import pytest
import torch

from ladder_residual import rewire
from ladder_residual.train.compile import compile_layers
from ladder_residual.train.emulated_ranks import emulate_ranks
from ladder_residual.train.loop import train
from ladder_residual.train.recipe import Recipe
from tests.ranks import run_on_ranks
from tests.tiny_models import VOCAB, clone, random_ids, relative, simulated, tiny_model
from tests.tiny_training import MODEL, check_same, tiny_recipe, train_on_ranks, trained_losses

IDS = random_ids(3, 9)


def loss_of(model, logits):
    return model.loss_function(logits, IDS, vocab_size=VOCAB)


@pytest.mark.parametrize(
    "spec", ["desync-2x", "desync-3x", "delayed-1", "delayed-2", "desync-2x:1-2", "delayed-1:2-3", "ladder"]
)
def test_emulated_ranks_equal_the_simulated_ones(spec):
    plain = tiny_model("llama")  # with biases, which rank 0 alone adds
    if spec == "ladder":  # is the same on any number of ranks
        expected = rewire(clone(plain), spec)(IDS).logits.detach()
        assert relative(emulate_ranks(rewire(plain, spec), 2)(IDS).logits.detach(), expected) < 1e-5
        return
    model = emulate_ranks(rewire(clone(plain), spec), 2)
    expected = simulated(plain, spec, 2, {"input_ids": IDS, "attention_mask": torch.ones_like(IDS)})
    found = model(IDS).logits
    assert relative(found.detach(), expected.detach()) < 1e-5
    standard = rewire(clone(plain), "standard")(IDS).logits
    assert relative(standard.detach(), expected.detach()) > 1e-3  # it is another function than on one rank
    loss_of(plain, expected).backward()
    loss_of(model, found).backward()
    gradients = {name: parameter.grad for name, parameter in plain.named_parameters()}
    for name, parameter in model.named_parameters():
        assert relative(parameter.grad, gradients[name]) < 2e-4 or gradients[name].norm() < 1e-6, name


@pytest.mark.slow
def test_emulated_ranks_compiled():
    eager = emulate_ranks(rewire(tiny_model("llama"), "desync-2x"), 2)
    expected = eager(IDS, use_cache=False).logits.detach()
    found = compile_layers(eager)(IDS, use_cache=False).logits.detach()
    assert relative(found, expected) < 1e-5


def test_what_cannot_be_emulated_is_refused():
    with pytest.raises(ValueError, match="4 emulated ranks do not divide the 2 KV heads"):
        emulate_ranks(rewire(tiny_model("llama"), "desync-2x"), 4)
    with pytest.raises(ValueError, match="was made for tp=4"):
        emulate_ranks(rewire(tiny_model("llama"), "desync-2x@4"), 2)
    for family in ("phi3", "mixtral"):  # fused projections; experts
        with pytest.raises(ValueError, match="is not: use real ranks"):
            emulate_ranks(rewire(tiny_model(family), "desync-2x"), 2)


def test_emulated_ranks_take_the_steps_of_real_ones(corpus, tmp_path):
    model, short = MODEL | {"num_kv_heads": 2}, dict(steps=6, precision="fp32", device="cpu")
    wirings = ["desync-2x", "delayed-1", "ladder"]
    real = [
        tiny_recipe(corpus, tmp_path / "real" / wiring, model=model | {"wiring": wiring}, parallel=dict(tp=2), run=short)
        for wiring in wirings
    ]
    run_on_ranks(2, train_on_ranks, real)
    for wiring in wirings:
        directory = tmp_path / "emulated" / wiring
        document = tiny_recipe(corpus, directory, model=model | {"wiring": wiring}, parallel=dict(emulate_ranks=2), run=short)
        train(Recipe.from_dict(document), quiet=True)
        check_same(trained_losses(directory), trained_losses(tmp_path / "real" / wiring), 2e-5)
