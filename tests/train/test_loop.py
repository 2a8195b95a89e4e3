"""Training on real processes: every layout takes the same steps."""

import json
import math
import shutil
import sys
from types import SimpleNamespace

import pytest

from ladder_residual.models.loading import set_reducers
from ladder_residual.train import loop as loop_module
from ladder_residual.train.checkpoints import complete_checkpoints
from ladder_residual.train.export import export
from ladder_residual.train.layout import arranged
from ladder_residual.train.loop import Diverged, Loop, train
from ladder_residual.train.recipe import Recipe
from tests import tiny_training
from tests.ranks import run_on_ranks
from tests.tiny_training import LAYOUTS, check_same, tiny_corpus, tiny_recipe, train_on_ranks, trained_losses


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_take_the_same_steps(layout, corpus, alone, tmp_path):
    ranks, tp = LAYOUTS[layout]
    documents = [tiny_recipe(corpus, tmp_path / wiring, wiring, parallel=dict(tp=tp)) for wiring in alone]
    results = run_on_ranks(ranks, train_on_ranks, documents)[0]
    for (wiring, reference), result in zip(alone.items(), results, strict=True):
        losses = trained_losses(reference)
        assert len(losses) == 20
        assert losses[20][0] < losses[1][0] - 0.5  # something was learnt, so that equal losses mean something
        check_same(trained_losses(tmp_path / wiring), losses, 1e-5)
        # The last events of a log: evaluation and checkpoint.
        valid = [json.loads(line) for line in (reference / "log.jsonl").read_text().splitlines() if '"valid"' in line]
        assert result["valid"]["loss"] == pytest.approx(valid[-1]["loss"], rel=1e-5)


def reductions_of_a_step(world, document):
    """Starts, waits and computes of forward and backward of a step under FSDP, in order."""
    recipe, events = Recipe.from_dict(document), []
    with arranged(world, 60, recipe.parallel.tp, None) as layout:
        loop = Loop(recipe, layout, resume="auto", quiet=True)
        model, reducer = loop.trained.model, layout.tensor.reducer()
        launch = reducer.launch

        class Watched:
            def __init__(self, inner, number):
                self.inner, self.number = inner, number

            def wait(self):
                events.append(("wait", self.number))
                return self.inner.wait()

        def watched_launch(partial):
            events.append(("start", sum(kind == "start" for kind, _ in events)))
            return Watched(launch(partial), events[-1][1])

        reducer.launch = watched_launch
        set_reducers(model, reducer)
        for layer in model.base_model.layers:
            for module in (layer.self_attn, layer.mlp):
                module.register_forward_pre_hook(lambda *_: events.append(("compute", "")))
                module.register_full_backward_pre_hook(lambda *_: events.append(("compute", "")))
        loop.take_step(loop.batch(0))
        loop.close()
    return events


@pytest.mark.parametrize(("ranks", "wiring", "hidden"), [(2, "standard", 0), (4, "ladder", 5 + 5)])
def test_all_reduces_are_hidden_forward_and_backward_under_fsdp(ranks, wiring, hidden, corpus, tmp_path):
    document = tiny_recipe(corpus, tmp_path, wiring, parallel=dict(tp=2), batch=dict(rows=ranks))
    events = run_on_ranks(ranks, reductions_of_a_step, document)[0]
    starts = [number for kind, number in events if kind == "start"]
    # Six modules and the embedding, forward and backward. With nothing left to compute, the embedding's and the last all-reduce stay open.
    assert len(starts) == 14
    spans = [events[events.index(("start", number)) : events.index(("wait", number))] for number in starts]
    assert sum(any(kind == "compute" for kind, _ in span) for span in spans) == hidden


@pytest.mark.slow
def test_layouts_agree_in_the_mode_of_large_runs(corpus, tmp_path):
    """bf16 weights in the layers, compiled modules, activations computed again: as the recipes for many GPUs ask."""
    mode = dict(steps=6, precision="bf16", compile=True, checkpoint_activations=True, device="cpu", timeout=300.0)
    alone, ranks = (tiny_recipe(corpus, tmp_path / name, run=mode) for name in ("alone", "ranks"))
    run_on_ranks(1, train_on_ranks, [alone])
    run_on_ranks(4, train_on_ranks, [ranks | {"parallel": dict(tp=2)}])
    losses = trained_losses(tmp_path / "alone")
    assert len(losses) == 6
    assert losses[6][0] < losses[1][0] - 0.2
    check_same(trained_losses(tmp_path / "ranks"), losses, 1e-2)


def test_a_loss_that_is_no_number_stops_the_run(corpus, tmp_path, monkeypatch):
    share = loop_module.lr_share
    monkeypatch.setattr(loop_module, "lr_share", lambda step, *rest: math.nan if step == 4 else share(step, *rest))
    document = tiny_recipe(corpus, tmp_path, checkpoint=dict(every=2), log=dict(every=5, tensorboard=False))
    with pytest.raises(Diverged, match=r"step 6: loss nan, .*step-00000004, is from before"):
        train(Recipe.from_dict(document), quiet=True)
    assert [path.name for path in complete_checkpoints(tmp_path / "checkpoints")] == ["step-00000002", "step-00000004"]


@pytest.mark.parametrize("wiring", ["parallel", "ladder:last-1", "desync-2x", "delayed-1"])
def test_other_wirings_train_and_say_what_they_are(wiring, corpus, tmp_path):
    ranks = 2 if wiring.startswith("de") else 1
    document = tiny_recipe(
        corpus,
        tmp_path / "run",
        wiring,
        model=tiny_training.MODEL | {"wiring": wiring, "num_kv_heads": 2},
        parallel=dict(emulate_ranks=ranks),
    )
    train(Recipe.from_dict(document), quiet=True)
    losses = trained_losses(tmp_path / "run")
    assert losses[20][0] < losses[1][0] - 0.5
    export(tmp_path / "run", tmp_path / "out")
    spec = json.loads((tmp_path / "out" / "config.json").read_text())["wiring"]
    assert spec == {"ladder:last-1": "ladder:2"}.get(wiring, wiring) + ("@2" if ranks == 2 else "")


def test_wandb_gets_the_numbers_and_one_run_stays_one(corpus, tmp_path, monkeypatch):
    """The package is not installed here: a stand-in keeps what it gets."""
    seen = []
    begun = SimpleNamespace(log=lambda numbers, step: seen.append((step, numbers)), finish=lambda: seen.append("finished"))
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **words: seen.append(words) or begun))
    document = tiny_recipe(corpus, tmp_path, log=dict(wandb="ladders"), checkpoint=dict(every=2))
    for _ in range(2):
        train(Recipe.from_dict(document), quiet=True, stop_after=2)
    first, second = (words for words in seen if isinstance(words, dict))
    assert first["project"] == "ladders"
    assert first["id"] == second["id"]
    losses = [
        (step, numbers["train/loss"]) for step, numbers in (e for e in seen if isinstance(e, tuple)) if "train/loss" in numbers
    ]
    assert losses == [(step, loss) for step, (loss, _) in trained_losses(tmp_path).items()]
    assert seen[-1] == "finished"


def test_what_cannot_be_trained_is_refused(corpus, tmp_path):
    def refused(message, **changes):
        with pytest.raises(ValueError, match=message):
            train(Recipe.from_dict(tiny_recipe(corpus, tmp_path, **changes)), quiet=True)

    refused("data.train: .* has no index.json", data=dict(train=str(tmp_path / "none")))
    for number, damage in enumerate(("gone", "cut", "changed")):
        shards = tmp_path / damage
        shutil.copytree(corpus, shards)
        file = shards / "00000.tokens"
        data = bytearray(file.read_bytes())
        data[100] ^= 1
        [file.unlink, lambda file=file: file.write_bytes(b"1"), lambda file=file, data=data: file.write_bytes(data)][number]()
        expected = ("is missing", "has 1 bytes, the index says", "is damaged: its sha256")[number]
        refused(f"data.train: .*00000.tokens {expected}", data=dict(train=str(shards)))
    refused("vocabulary of 512, but model.vocab_size is 300", model=tiny_training.MODEL | {"vocab_size": 300})
    refused(r"parallel\.tp 2 does not fit", parallel=dict(tp=2))
    refused("micro_rows 3 does not divide the 8 rows", batch=dict(rows=8, micro_rows=3))
    train(Recipe.from_dict(tiny_recipe(corpus, tmp_path, run=dict(steps=2, precision="fp32", device="cpu"))), quiet=True)
    refused("was trained with optimizer.lr = 0.01, this recipe says 0.1", optimizer=dict(lr=0.1, warmup=0))
    refused("was trained on other data than .*other holds now", data=dict(train=str(tiny_corpus(tmp_path / "other", 6600))))
    short = dict(steps=2, precision="fp32", device="cpu")
    desync = dict(
        model=tiny_training.MODEL | {"wiring": "desync-2x", "num_kv_heads": 2},
        checkpoint=dict(directory=str(tmp_path / "desync")),
        run=short,
    )
    train(Recipe.from_dict(tiny_recipe(corpus, tmp_path, **desync, parallel=dict(emulate_ranks=2))), quiet=True)
    refused("was trained as desync-2x@2, .* would go on as desync-2x@1", **desync)
    with pytest.raises(ValueError, match="holds a run already"):
        train(Recipe.from_dict(tiny_recipe(corpus, tmp_path)), quiet=True, resume="never")
