"""Checkpoints: killed at any moment, resumed on any ranks, damaged or forged, a run goes on or says why not."""

import json
import random
import resource
import shutil
import subprocess
import sys
import time
import traceback
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from ladder_residual.train.checkpoints import SaveFailed, complete_checkpoints, problem_of
from ladder_residual.train.export import export
from ladder_residual.train.layout import training_layout
from ladder_residual.train.loop import Loop, train
from ladder_residual.train.manifest import MANIFEST
from ladder_residual.train.recipe import Recipe
from tests.forged import damage, forge_metadata
from tests.ranks import run_on_ranks
from tests.tiny_training import (
    LAYOUTS,
    as_toml,
    check_same,
    steps_logged,
    tiny_recipe,
    train_and_kill,
    train_on_ranks,
    trained_losses,
)


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


@pytest.mark.parametrize("how", ["cut", "changed", "gone", "manifest"])
def test_a_damaged_checkpoint_is_noticed_and_the_one_before_is_used(how, corpus, alone, tmp_path, capsys):
    shutil.copytree(alone["ladder"], tmp_path / "run")
    newest = complete_checkpoints(tmp_path / "run" / "checkpoints")[-1]
    file = newest / "__0_0.distcp"
    if how == "cut":
        file.write_bytes(file.read_bytes()[:-1000])
    elif how == "changed":
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
    elif how == "gone":
        file.unlink()
    else:
        (newest / "complete.json").write_text("{")
    train(Recipe.from_dict(tiny_recipe(corpus, tmp_path / "run")))
    said = " ".join(capsys.readouterr().err.split())
    expected = {
        "cut": "bytes instead of",
        "changed": "the checksum of __0_0.distcp is wrong",
        "gone": "__0_0.distcp is missing",
        "manifest": "complete.json is not readable JSON",
    }
    assert "step-00000020 is damaged" in said
    assert expected[how] in said
    assert "step-00000016 (step 16" in said
    assert trained_losses(tmp_path / "run") == trained_losses(alone["ladder"])
    assert problem_of(newest) == ""  # written again
    assert newest.with_name("step-00000020.damaged").is_dir()  # and what was there is kept
    assert export(tmp_path / "run", tmp_path / "exported") == newest


def test_what_a_forged_checkpoint_says_does_not_steer_the_terminal(corpus, alone, tmp_path, capsys, monkeypatch):
    shutil.copytree(alone["ladder"], tmp_path / "run")
    newest = complete_checkpoints(tmp_path / "run" / "checkpoints")[-1]
    manifest = json.loads((newest / MANIFEST).read_text())
    (newest / MANIFEST).write_text(json.dumps(manifest | {"recipe": {"\x1bcut": 1}}))
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    train(Recipe.from_dict(tiny_recipe(corpus, tmp_path / "run")))
    said = capsys.readouterr().err
    assert "cut" in said
    assert "\x1bc" not in said  # it clears a terminal


def everything_in(directory):
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_a_run_whose_checkpoints_are_all_damaged_stops_and_changes_nothing(corpus, alone, tmp_path):
    """Starting at step 0 again would overwrite the log, the only thing that is left of it."""
    shutil.copytree(alone["ladder"], tmp_path / "run")
    oldest, *others, newest = complete_checkpoints(tmp_path / "run" / "checkpoints")
    (oldest / "__0_0.distcp").write_bytes(b"")
    for path in others:
        shutil.rmtree(path)
    (newest / MANIFEST).unlink()
    before = everything_in(tmp_path / "run")
    for resume in ("auto", "never"):
        expected = "is damaged .*00000020: complete.json is missing; step-00000008: __0_0.distcp has 0 bytes.*start again, move"
        with pytest.raises(ValueError, match=expected if resume == "auto" else "holds a run already") as caught:
            train(Recipe.from_dict(tiny_recipe(corpus, tmp_path / "run")), quiet=True, resume=resume)
        assert "\n" not in str(caught.value)
        assert everything_in(tmp_path / "run") == before


def test_any_damage_or_forgery_is_one_line(corpus, alone, tmp_path):
    """In any file, with the checksum made right again or not: the run goes on, or says in one line of ours why not."""
    document = tiny_recipe(corpus, tmp_path / "run", run=dict(steps=20, precision="fp32", device="cpu"))
    recipe = Recipe.from_dict(document)
    good = complete_checkpoints(alone["ladder"] / "checkpoints")[-1]
    checkpoint = tmp_path / "run" / "checkpoints" / good.name
    refused = 0
    with training_layout("cpu", 60, 1, None) as layout:
        loop = Loop(recipe, layout, resume="auto", quiet=True)

        def resume():
            loop.checkpoints.load(loop.trained, loop.optimizer, recipe, loop.about["data"], lambda text: None)

        for seed in range(60):
            shutil.rmtree(checkpoint, ignore_errors=True)
            shutil.copytree(good, checkpoint)
            done = damage(checkpoint, random.Random(seed))
            for reader in (resume, lambda: export(tmp_path / "run", tmp_path / "exported", overwrite=True)):
                try:
                    reader()
                except ValueError as error:
                    refused += 1
                    raised = traceback.extract_tb(error.__traceback__)[-1].filename
                    assert "\n" not in str(error), (seed, done)
                    assert "ladder_residual" in raised, (seed, done, raised)
        loop.close()
    assert refused > 60


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


@pytest.mark.parametrize("kind", ["pickle", "bytes"])
def test_a_forged_checkpoint_is_not_resumed(kind, corpus, alone, tmp_path):
    shutil.copytree(alone["ladder"], tmp_path / "run")
    forge_metadata(complete_checkpoints(tmp_path / "run" / "checkpoints")[-1], kind, tmp_path / "marker")
    with pytest.raises(ValueError, match="no list of a checkpoint's tensors") as caught:
        train(Recipe.from_dict(tiny_recipe(corpus, tmp_path / "run")), quiet=True)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "marker").exists()
