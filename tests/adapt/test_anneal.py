"""The wiring between standard and ladder: on ranks, over a run, over an interruption."""

import json
from types import SimpleNamespace

import pytest
import torch

from ladder_residual.adapt.anneal import Anneal
from ladder_residual.adapt.checkpoints import last_checkpoint
from ladder_residual.models.hf import rewire, set_switched
from ladder_residual.models.loading import load_model
from tests.ranks import run_on_ranks
from tests.tiny_adapt import log_entries, losses, run, settings, stop_after_a_checkpoint
from tests.tiny_models import shard_model, tiny_model

RUN = dict(tokens=512 * 8, anneal=0.5, save_every=3, heldout=(), log_every=1)


def logits_and_gradient(model):
    model = rewire(model, "ladder:1-3")
    set_switched(model, torch.tensor(0.4))
    ids = torch.randint(3, 96, (2, 9), generator=torch.Generator().manual_seed(0))
    logits = model(ids).logits
    (gradient,) = torch.autograd.grad(logits.square().mean(), [model.base_model.layers[2].mlp.down_proj.weight])
    return logits.detach(), gradient


def on_rank(world, family):
    logits, gradient = logits_and_gradient(shard_model(tiny_model(family), world))
    return logits.numpy(), gradient.numpy()


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_ranks_compute_what_one_process_computes(family):
    logits, gradient = logits_and_gradient(tiny_model(family))
    ranks = [tuple(map(torch.from_numpy, each)) for each in run_on_ranks(2, on_rank, family)]
    for theirs, _ in ranks:
        torch.testing.assert_close(theirs, logits, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(torch.cat([part for _, part in ranks], 1), gradient, rtol=1e-3, atol=1e-6)


def steps_of(divergences, share, bound=1.0):
    anneal, model = Anneal(tiny_model("llama"), share, bound, lambda line: None), None
    found = []
    for step, divergence in enumerate(divergences, start=1):
        for part in (0.25, 0.75):  # two micro-batches
            anneal.note(torch.tensor(part * divergence))
        anneal.on_step_end(None, SimpleNamespace(global_step=step, max_steps=len(divergences)), None)
        found.append(anneal.switched)
        model = anneal.model
    return found, model.base_model.layers[0].switched


def test_it_rises_over_its_share_and_pauses_above_the_bound():
    assert steps_of([0.1] * 8, share=0.5) == ([0.25, 0.5, 0.75, 1, 1, 1, 1, 1], None)
    paused, _ = steps_of([0.1, 2.0, 2.0, 0.1, 0.1, 0.1, 0.1, 0.1], share=0.5)
    assert paused == [0.25, 0.25, 0.25, 0.5, 0.75, 1, 1, 1]
    never, left = steps_of([9.0] * 8, share=0.25)
    assert never == [0, 0, 0.5, 1, 1, 1, 1, 1]  # in time
    assert left is None


def test_a_run_starts_as_the_original_and_ends_as_a_ladder(ground):
    said = run(ground, "annealed", **RUN | dict(heldout=(str(ground / "heldout.txt"),)))
    entries = log_entries(ground, "annealed")
    assert [entry["switched"] for entry in entries] == [0, 0.25, 0.5, 0.75, 1, 1, 1, 1]
    assert entries[0]["divergence"] == pytest.approx(0, abs=1e-5)
    assert entries[3]["divergence"] > 0.01
    at_once = run(ground, "at-once", **RUN | dict(anneal=0.0, heldout=(str(ground / "heldout.txt"),)))
    assert said.before == at_once.before  # what is measured is the ladder
    assert said.after["heldout.txt"]["loss"] < said.before["heldout.txt"]["loss"]
    assert load_model(ground / "annealed").wiring.spec == "ladder"
    assert all(layer.switched is None for layer in load_model(ground / "annealed").base_model.layers)


def test_an_interrupted_run_goes_on_where_it_was(ground):
    changes = RUN | dict(anneal_kl=0.05)  # pauses
    run(ground, "anneal-straight", **changes)
    assert stop_after_a_checkpoint(ground, "anneal-broken", **changes) == "stopped"
    kept = json.loads((last_checkpoint(ground / "anneal-broken.training") / "anneal.json").read_text())
    assert 0 < kept["switched"] < 1
    assert kept["paused"] > 0
    run(ground, "anneal-broken", **changes)
    assert losses(ground, "anneal-broken") == losses(ground, "anneal-straight")
    switched = [[entry["switched"] for entry in log_entries(ground, name)] for name in ("anneal-broken", "anneal-straight")]
    assert switched[0] == switched[1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(anneal=0.6), "anneal"),
        (dict(anneal=0.1, anneal_kl=0.0), "anneal_kl"),
        (dict(anneal=0.1, stages=("ladder:4",)), "two ways"),
        (dict(anneal=0.1, control=True, method="sft"), "drop anneal"),
    ],
)
def test_what_makes_no_sense_is_refused(ground, changes, message):
    with pytest.raises(ValueError, match=message):
        settings(ground, "none", **changes)
    with pytest.raises(ValueError, match="wiring standard is neither: drop anneal"):
        run(ground, "none", student=str(ground / "original"), anneal=0.1)
