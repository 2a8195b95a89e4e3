"""Training on real processes: every layout takes the same steps, and nothing that happens to a run changes them."""

import json
import math
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from transformers import AutoModelForCausalLM

import tiny_training
from ladder_residual.loading import set_reducers
from ladder_residual.train import loop as loop_module
from ladder_residual.train.checkpoints import MANIFEST, SaveFailed, check_files, complete_checkpoints
from ladder_residual.train.export import export
from ladder_residual.train.layout import arranged
from ladder_residual.train.loop import Diverged, Loop, train
from ladder_residual.train.recipe import Recipe
from ranks import run_on_ranks
from tiny_training import steps_logged, tiny_corpus, tiny_recipe, train_and_kill, train_on_ranks, trained_losses

LAYOUTS = {"tp2": (2, 2), "dp2": (2, 1), "dp2 x tp2": (4, 2)}  # ranks, tp


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return tiny_corpus(tmp_path_factory.mktemp("data") / "corpus")


@pytest.fixture(scope="module")
def alone(corpus, tmp_path_factory):
    """The runs on one process that all others are compared with: {wiring: directory}."""
    directories = {}
    for wiring in ("standard", "ladder"):
        directories[wiring] = tmp_path_factory.mktemp("alone") / wiring
        train(Recipe.from_dict(tiny_recipe(corpus, directories[wiring], wiring, checkpoint=dict(every=8, keep=9))), quiet=True)
    return directories


def check_same(found, expected, tolerance):
    assert found.keys() == expected.keys()
    for step, (loss, norm) in expected.items():
        assert found[step][0] == pytest.approx(loss, rel=tolerance), step
        assert found[step][1] == pytest.approx(norm, rel=20 * tolerance), step  # the norm magnifies what the loss rounds


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


def sums_of_a_step(world, document):
    """Starts, waits and computes of forward and backward of a step under FSDP, in order."""
    recipe, events = Recipe.from_dict(document), []
    with arranged(world, 60, recipe.parallel.tp, None) as layout:
        loop = Loop(recipe, layout, resume="auto", quiet=True)
        model, reducer = loop.trained.model, layout.tensor.reducer()
        launch = reducer.launch

        class Watched:
            def __init__(self, inner, number):
                self.inner, self.number = inner, number

            def finish(self):
                events.append(("wait", self.number))
                return self.inner.finish()

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
def test_sums_are_hidden_forward_and_backward_under_fsdp(ranks, wiring, hidden, corpus, tmp_path):
    document = tiny_recipe(corpus, tmp_path, wiring, parallel=dict(tp=2), batch=dict(rows=ranks))
    events = run_on_ranks(ranks, sums_of_a_step, document)[0]
    starts = [number for kind, number in events if kind == "start"]
    # Six modules and the embedding, forward and backward. With nothing left to compute, the embedding's and the last sum stay open.
    assert len(starts) == 14
    spans = [events[events.index(("start", number)) : events.index(("wait", number))] for number in starts]
    assert sum(any(kind == "compute" for kind, _ in span) for span in spans) == hidden


def test_killed_at_any_moment_a_run_goes_on_bit_for_bit(corpus, alone, tmp_path):
    document = tiny_recipe(corpus, tmp_path, checkpoint=dict(every=3))
    assert train_and_kill(document, lambda: steps_logged(tmp_path) >= 5) == -9  # between two checkpoints

    def unfinished():
        return any((tmp_path / "checkpoints").glob("*.tmp/*"))

    for _ in range(5):  # in the middle of one: the signal may come too late for that
        assert train_and_kill(document, lambda: steps_logged(tmp_path) >= 8 and unfinished()) == -9
        if unfinished():
            break
    assert unfinished()
    assert complete_checkpoints(tmp_path / "checkpoints")
    train(Recipe.from_dict(document), quiet=True)
    assert trained_losses(tmp_path) == trained_losses(alone["ladder"])


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


@pytest.mark.slow
def test_killed_again_and_again(corpus, alone, tmp_path):
    generator = torch.Generator().manual_seed(0)
    document = tiny_recipe(corpus, tmp_path, checkpoint=dict(every=1))
    for target in range(2, 20):
        delay = int(torch.randint(0, 400, (), generator=generator))
        calls = iter(range(10**9))
        started = []

        def late(target=target, delay=delay, calls=calls, started=started):
            if steps_logged(tmp_path) >= target:
                started.append(next(calls))
            return len(started) > delay

        train_and_kill(document, late)
    train(Recipe.from_dict(document), quiet=True)
    assert trained_losses(tmp_path) == trained_losses(alone["ladder"])


@pytest.mark.slow
def test_ranks_that_are_killed_go_on_within_rounding(corpus, alone, tmp_path):
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(as_toml(tiny_recipe(corpus, tmp_path / "run", parallel=dict(tp=2), checkpoint=dict(every=3))))
    command = [sys.executable, "-m", "ladder_residual", "train", str(recipe), "--ranks", "4"]
    launcher = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    while steps_logged(tmp_path / "run") < 8 and launcher.poll() is None:
        time.sleep(0.01)
    assert launcher.poll() is None, "it ended before it could be killed"
    launcher.kill()  # its ranks follow it
    launcher.wait()
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "resumed from" in done.stderr
    check_same(trained_losses(tmp_path / "run"), trained_losses(alone["ladder"]), 1e-5)


def as_toml(document):
    lines = [f"name = {document['name']!r}"]
    for table, values in document.items():
        if isinstance(values, dict):
            lines += [f"[{table}]", *(f"{key} = {json.dumps(value)}" for key, value in values.items())]
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("layout", "wiring"),
    [
        pytest.param("tp2", "ladder", marks=pytest.mark.slow),
        pytest.param("dp2", "standard", marks=pytest.mark.slow),
        ("dp2 x tp2", "ladder"),
    ],
)
def test_a_run_goes_on_with_other_ranks_and_back(layout, wiring, corpus, alone, tmp_path):
    ranks, tp = LAYOUTS[layout]
    shutil.copytree(alone[wiring], tmp_path / "run")
    for later in complete_checkpoints(tmp_path / "run" / "checkpoints")[1:]:
        shutil.rmtree(later)
    document = tiny_recipe(corpus, tmp_path / "run", wiring, parallel=dict(tp=tp), checkpoint=dict(every=8, keep=9))
    result = run_on_ranks(ranks, train_on_ranks, [document])[0][0]
    assert "step 8, written by dp 1 x tp 1" in result["messages"][0]
    check_same(trained_losses(tmp_path / "run"), trained_losses(alone[wiring]), 1e-5)
    # And back on one process, from the checkpoint the ranks wrote at step 16.
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-00000020")
    train(Recipe.from_dict(tiny_recipe(corpus, tmp_path / "run", wiring)), quiet=True)
    check_same(trained_losses(tmp_path / "run"), trained_losses(alone[wiring]), 1e-5)


@pytest.mark.parametrize("damage", ["cut", "changed", "gone", "manifest"])
def test_a_damaged_checkpoint_is_noticed_and_the_one_before_is_used(damage, corpus, alone, tmp_path, capsys):
    shutil.copytree(alone["ladder"], tmp_path / "run")
    newest = complete_checkpoints(tmp_path / "run" / "checkpoints")[-1]
    file = newest / "__0_0.distcp"
    if damage == "cut":
        file.write_bytes(file.read_bytes()[:-1000])
    elif damage == "changed":
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
    elif damage == "gone":
        file.unlink()
    else:
        (newest / "complete.json").write_text("{")
    train(Recipe.from_dict(tiny_recipe(corpus, tmp_path / "run")))
    said = " ".join(capsys.readouterr().err.split())
    expected = {
        "cut": "bytes instead of",
        "changed": "the checksum of __0_0.distcp is wrong",
        "gone": "__0_0.distcp is missing",
        "manifest": "complete.json cannot be read",
    }
    assert "step-00000020 is damaged" in said
    assert expected[damage] in said
    assert "step-00000016 (step 16" in said
    assert trained_losses(tmp_path / "run") == trained_losses(alone["ladder"])
    assert check_files(newest) == ""  # written again
    assert newest.with_name("step-00000020.damaged").is_dir()  # and what was there is kept
    assert export(tmp_path / "run", tmp_path / "exported") == newest


def resumed_with_another_checkpoint_on_rank_1(world, document):
    read = Path.read_text

    def other(path, *arguments, **options):
        return read(path, *arguments, **options) + (" " if path.name == MANIFEST and world.rank == 1 else "")

    with patch.object(Path, "read_text", other), pytest.raises(ValueError, match="the checkpoint .* of rank 1 on .* differs"):
        train_on_ranks(world, [document])


def test_ranks_that_see_unlike_checkpoints_refuse(corpus, alone, tmp_path):
    shutil.copytree(alone["ladder"], tmp_path / "run")
    run_on_ranks(2, resumed_with_another_checkpoint_on_rank_1, tiny_recipe(corpus, tmp_path / "run", parallel=dict(tp=2)))


def test_a_full_disk_leaves_the_older_checkpoint(corpus, tmp_path):
    document = tiny_recipe(corpus, tmp_path, run=dict(steps=4, precision="fp32", device="cpu"), checkpoint=dict(every=2))
    train(Recipe.from_dict(document), quiet=True, stop_after=2)
    before = complete_checkpoints(tmp_path / "checkpoints")
    assert len(before) == 1
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))  # no file may grow beyond this: as on a full disk
    try:
        with pytest.raises(
            SaveFailed, match="could not save step 4 .*File too large.*newest good checkpoint is .*step-00000002"
        ):
            train(Recipe.from_dict(document), quiet=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert complete_checkpoints(tmp_path / "checkpoints") == before
    assert not list((tmp_path / "checkpoints").glob("*.tmp"))
    train(Recipe.from_dict(document), quiet=True)  # with space again it goes on


def test_a_loss_that_is_no_number_stops_the_run(corpus, tmp_path, monkeypatch):
    share = loop_module.lr_share
    monkeypatch.setattr(loop_module, "lr_share", lambda step, *rest: math.nan if step == 4 else share(step, *rest))
    document = tiny_recipe(corpus, tmp_path, checkpoint=dict(every=2), log=dict(every=5, tensorboard=False))
    with pytest.raises(Diverged, match=r"step 6: loss nan, .*step-00000004, is from before"):
        train(Recipe.from_dict(document), quiet=True)
    assert [path.name for path in complete_checkpoints(tmp_path / "checkpoints")] == ["step-00000002", "step-00000004"]


def test_an_export_is_a_hugging_face_checkpoint(corpus, alone, tmp_path):
    export(alone["ladder"], tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert type(model).__name__ == "LadderLlamaForCausalLM"
    assert model.wiring.spec == "ladder"
    rows = loop_module.open_rows(Recipe.from_dict(tiny_recipe(corpus, tmp_path)), "valid", shuffle=False)
    batch = rows.batch(0, 6)
    with torch.no_grad():
        loss = model(**batch).loss.item()
    valid = [json.loads(line) for line in (alone["ladder"] / "log.jsonl").read_text().splitlines() if '"valid"' in line]
    assert loss == pytest.approx(valid[-1]["loss"], rel=1e-5)
    with pytest.raises(ValueError, match="exists; choose another directory"):
        export(alone["ladder"], tmp_path / "out")
    with pytest.raises(ValueError, match="holds no good checkpoint"):
        export(tmp_path, tmp_path / "other")


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


def test_emulated_ranks_take_the_steps_of_real_ones(corpus, tmp_path):
    model, short = tiny_training.MODEL | {"num_kv_heads": 2}, dict(steps=6, precision="fp32", device="cpu")
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


def test_wandb_gets_the_numbers_and_one_run_stays_one(corpus, tmp_path, monkeypatch):
    """The package is not installed here: a stand-in keeps what it is told."""
    told = []
    begun = SimpleNamespace(log=lambda numbers, step: told.append((step, numbers)), finish=lambda: told.append("finished"))
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **words: told.append(words) or begun))
    document = tiny_recipe(corpus, tmp_path, log=dict(wandb="ladders"), checkpoint=dict(every=2))
    for _ in range(2):
        train(Recipe.from_dict(document), quiet=True, stop_after=2)
    first, second = (words for words in told if isinstance(words, dict))
    assert first["project"] == "ladders"
    assert first["id"] == second["id"]
    losses = [
        (step, numbers["train/loss"]) for step, numbers in (e for e in told if isinstance(e, tuple)) if "train/loss" in numbers
    ]
    assert losses == [(step, loss) for step, (loss, _) in trained_losses(tmp_path).items()]
    assert told[-1] == "finished"


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
