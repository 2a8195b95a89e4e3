"""The chunked loss against its plain twin."""

import pytest
import torch
from torch.nn import functional as F

from ladder_residual import rewire
from ladder_residual.models.chunks import local_part
from ladder_residual.train.gradients import finish_gradients
from ladder_residual.train.loss import chunked_cross_entropy, head_of
from tests.ranks import run_on_ranks
from tests.tiny_models import VOCAB, clone, random_ids, shard_model, tiny_model

IDS = random_ids(3, 9)


def worst(found, expected):
    return max(((found[name] - expected[name]).norm() / expected[name].norm().clamp_min(1e-7)).item() for name in expected)


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
    expected, entropy = plain_loss(model(IDS).logits, labels, z_loss)
    (3 * expected).backward()
    wanted = {name: parameter.grad for name, parameter in model.named_parameters()}
    twin = clone(model)
    twin.zero_grad()
    hidden = twin.base_model(IDS).last_hidden_state
    found = chunked_cross_entropy(hidden, head_of(twin), labels, chunk=chunk, z_loss=z_loss)
    (3 * found.total).backward()
    assert torch.allclose(found.total, expected, rtol=1e-5)
    assert torch.allclose(found.cross_entropy, entropy, rtol=1e-5)
    assert worst({name: parameter.grad for name, parameter in twin.named_parameters()}, wanted) < 2e-5
    with torch.no_grad():
        assert torch.allclose(chunked_cross_entropy(hidden, head_of(twin), labels).cross_entropy, entropy, rtol=1e-5)


@pytest.mark.slow
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
    expected, _ = plain_loss(whole(IDS).logits, labels)
    expected.backward()
    model = shard_model(clone(whole), world)
    found = chunked_cross_entropy(model.base_model(IDS).last_hidden_state, head_of(model), labels, chunk=7)
    found.total.backward()
    finish_gradients(model, world)
    wanted = {}
    for name, parameter in whole.named_parameters():
        wanted[name] = local_part(parameter.grad, model.shard_specs[name])
    error = worst({name: parameter.grad for name, parameter in model.named_parameters()}, wanted)
    return abs(found.total.item() - expected.item()), error


def test_chunked_loss_with_the_vocabulary_sharded_over_ranks():
    for loss, gradient in run_on_ranks(2, chunked_on_ranks):
        assert loss < 1e-5
        assert gradient < 2e-4


def test_a_chunk_has_at_least_one_token():
    with pytest.raises(ValueError, match="at least 1 token, got 0"):
        chunked_cross_entropy(torch.zeros(1, 2, 4), head_of(tiny_model("llama")), random_ids(1, 2), chunk=0)
