"""Numbers that are none end a run with one line, on one rank and on two, instead of becoming text or a traceback."""

import pytest
import torch
from transformers import AutoTokenizer

from ladder_residual.adapt.probe import Probe
from ladder_residual.data.batched_sampling import BatchedSampler, Start
from ladder_residual.distributed.world import World
from ladder_residual.evaluate.score import perplexity
from ladder_residual.generation.completion import complete
from ladder_residual.generation.sampling import Sampling
from ladder_residual.models.finite import NonFiniteError
from ladder_residual.models.loading import load_model
from tests.ranks import run_on_ranks


def overflowing(directory, rank=None):
    """Layer 2 multiplies beyond float32: its output and everything after it is infinite or NaN, the weights are finite."""
    model = load_model(directory, rank)
    with torch.no_grad():
        model.base_model.layers[2].mlp.down_proj.weight.fill_(3e38)
    return model


def refusal(world, directory, sampling):
    model, tokenizer = overflowing(directory, world), AutoTokenizer.from_pretrained(directory)
    tokenizer.pad_token_id, tokenizer.padding_side = 0, "left"
    try:
        complete(model, tokenizer, ["Once upon a time", "A dog"], sampling, world)
    except NonFiniteError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    "sampling", [Sampling(temperature=0), Sampling(temperature=1.0, top_p=0.9, seed=1)], ids=["greedy", "top-p"]
)
def test_generation_stops_with_step_and_layer(demo_dir, sampling):
    said = refusal(World(), demo_dir, sampling)
    assert said.startswith("the logits of step 1 are NaN or infinite, first seen in what layer 3 reads")
    assert run_on_ranks(2, refusal, demo_dir, sampling) == [said, said]


def test_scores_and_selection_stop(demo_dir):
    with pytest.raises(NonFiniteError, match="row of"):
        perplexity(overflowing(demo_dir), list(range(1, 40)), context=16, stride=16)
    with pytest.raises(NonFiniteError, match="loss is NaN"):
        Probe(overflowing(demo_dir), torch.arange(1, 33).view(2, 16))


@pytest.mark.parametrize("value", [float("-inf"), float("inf"), float("nan")])
def test_logits_without_a_finite_largest_stop(demo_dir, value):
    """Of -inf alone every token would be as likely as any."""
    model, tokenizer = load_model(demo_dir), AutoTokenizer.from_pretrained(demo_dir)
    tokenizer.pad_token_id, tokenizer.padding_side = 0, "left"
    head = model.get_output_embeddings()
    head.register_forward_hook(lambda module, args, logits: torch.full_like(logits, value))
    with pytest.raises(NonFiniteError, match="the logits of step 1"):
        complete(model, tokenizer, ["Once upon a time", "A dog"], Sampling(temperature=0), World())


def test_samples_stop(demo_dir):
    """``ladder data sample`` has a loop of its own."""
    start = Start(torch.tensor([[1], [1], [1]]), torch.zeros(3, dtype=torch.bool))
    settings = dict(rows=3, length=40, temperature=1.0, stops=set(), vocabulary=512)
    assert len(BatchedSampler(load_model(demo_dir), **settings).sample(start, seed=1)) == 3
    with pytest.raises(NonFiniteError, match="the logits of step 1 are NaN or infinite"):
        BatchedSampler(overflowing(demo_dir), **settings).sample(start, seed=1)
