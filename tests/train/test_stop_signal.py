"""One run a directory, and what is kept of a run that is asked to end."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ladder_residual.cli.main import app
from ladder_residual.common.locks import Lock
from ladder_residual.train.checkpoints import complete_checkpoints
from ladder_residual.train.logs import read_log
from ladder_residual.train.loop import Loop, train
from ladder_residual.train.recipe import Recipe
from ladder_residual.train.run_lock import run_lock
from tests.ranks import run_on_ranks
from tests.tiny_training import as_toml, check_same, steps_logged, tiny_recipe, train_on_ranks, trained_losses


@pytest.fixture
def signalled(monkeypatch):
    """``signalled(7)``: SIGTERM reaches this process while it computes step 7."""

    def at(step, number=signal.SIGTERM):
        take_step = Loop.take_step

        def with_signal(loop, batch):
            if loop.step + 1 == step:
                os.kill(os.getpid(), number)
            return take_step(loop, batch)

        monkeypatch.setattr(Loop, "take_step", with_signal)

    yield at
    monkeypatch.undo()


def names(directory):
    return [path.name for path in complete_checkpoints(directory / "checkpoints")]


def test_sigterm_saves_and_the_run_goes_on_bit_for_bit(corpus, alone, tmp_path, signalled, capsys):
    document = tiny_recipe(corpus, tmp_path / "run", checkpoint=dict(export=True))
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(as_toml(document))
    before = signal.getsignal(signal.SIGTERM)
    signalled(7)
    result = CliRunner().invoke(app, ["train", str(recipe)])
    assert result.exit_code == 143
    assert "stopped by SIGTERM after step 7: " in " ".join(result.stderr.split())
    assert "step-00000007 is kept, and the same command goes on" in " ".join(result.stderr.split())
    assert signal.getsignal(signal.SIGTERM) == before
    assert names(tmp_path / "run") == ["step-00000007"]
    assert not (tmp_path / "run" / "export").exists()
    result = CliRunner().invoke(app, ["train", str(recipe)])
    assert result.exit_code == 0, result.stderr
    assert trained_losses(tmp_path / "run") == trained_losses(alone["ladder"])
    assert sorted(os.listdir(tmp_path / "run")) == ["checkpoints", "export", "log.jsonl", "recipe.json"]


def test_sigterm_cuts_an_evaluation_off_which_is_made_up_for(corpus, tmp_path, monkeypatch):
    """A scheduler waits half a minute, which an evaluation may exceed."""
    document = tiny_recipe(corpus, tmp_path, run=dict(steps=4, precision="fp32", device="cpu"), evaluate=dict(every=2, rows=6))
    recipe = Recipe.from_dict(document)
    evaluate = Loop.evaluate
    for last, expected in ((2, []), (4, [2])):

        def with_signal(loop, last=last):
            if loop.step == last:
                os.kill(os.getpid(), signal.SIGTERM)
            return evaluate(loop)

        with monkeypatch.context() as patch:
            patch.setattr(Loop, "evaluate", with_signal)
            result = train(recipe, quiet=True)
        assert (result["stopped"], result["step"], result["valid"]) == (True, last, {})
        assert evaluations(tmp_path) == expected
    assert not train(recipe, quiet=True)["stopped"]
    assert evaluations(tmp_path) == [2, 4]


def evaluations(directory):
    return [event["step"] for event in read_log(directory) if event["event"] == "valid"]


def test_ctrl_c_says_what_was_kept(corpus, tmp_path, signalled, capsys):
    signalled(5, signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        train(Recipe.from_dict(tiny_recipe(corpus, tmp_path, checkpoint=dict(every=2))))
    said = " ".join(capsys.readouterr().err.split())
    assert "interrupted after step 4: " in said
    assert "step-00000004 is kept, and the same command goes on from there" in said


def stopped_by_one_rank(world, document):
    """Only rank 1 gets the signal; all ranks stop at the same step."""
    if world.rank == 1:
        take_step = Loop.take_step

        def with_signal(loop, batch):
            if loop.step == 5:
                os.kill(os.getpid(), signal.SIGTERM)
            return take_step(loop, batch)

        Loop.take_step = with_signal
    first = train_on_ranks(world, [document])[0]
    if world.rank == 1:
        Loop.take_step = take_step
    return first, train_on_ranks(world, [document])[0]


def test_ranks_stop_at_the_same_step(corpus, alone, tmp_path):
    document = tiny_recipe(corpus, tmp_path, parallel=dict(tp=2))
    results = run_on_ranks(2, stopped_by_one_rank, document)
    assert [(first["stopped"], first["step"]) for first, _ in results] == [(True, 7)] * 2
    assert [(second["stopped"], second["step"]) for _, second in results] == [(False, 20)] * 2
    assert names(tmp_path) == ["step-00000007", "step-00000020"]
    check_same(trained_losses(tmp_path), trained_losses(alone["ladder"]), 1e-5)


def locked_out(world, directory):
    with pytest.raises(ValueError, match="run is in use by process [0-9]+ on .*: wait") as caught, run_lock(directory, world):
        pass
    return str(caught.value)


def test_a_second_run_in_a_directory_is_refused(corpus, alone, tmp_path):
    directory = tmp_path / "run"
    shutil.copytree(alone["ladder"], directory)
    before = sorted(directory.rglob("*"))
    (directory / "checkpoints" / "step-00000024.tmp").mkdir()  # being written by the first
    with Lock(directory):
        with pytest.raises(ValueError, match=f"{re.escape(str(directory))} is in use by process {os.getpid()} on "):
            train(Recipe.from_dict(tiny_recipe(corpus, directory)), quiet=True)
        said = run_on_ranks(2, locked_out, directory)
        assert said[0] == said[1]
    assert (directory / "checkpoints" / "step-00000024.tmp").is_dir()
    (directory / "checkpoints" / "step-00000024.tmp").rmdir()
    assert sorted(directory.rglob("*")) == before


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["ladder", "one rank", "torchrun"])
def test_a_scheduler_ends_ranks_and_starts_them_again(launcher, corpus, alone, tmp_path):
    """SIGTERM to the launcher alone, as Slurm and Kubernetes send it, or to one of its ranks."""
    run, recipe = tmp_path / "run", tmp_path / "recipe.toml"
    recipe.write_text(as_toml(tiny_recipe(corpus, run, parallel=dict(tp=2))))
    words = [sys.executable, "-m", "ladder_residual", "train", str(recipe), "--ranks", "4"]
    if launcher == "torchrun":
        words = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "4", *words[1:5]]
    run.mkdir()
    with Lock(run):  # as if it ran already
        second = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert second.returncode == (1 if launcher == "torchrun" else 2)
    refusals = re.findall(rf"error: .*run is in use by process {os.getpid()} on .*: wait", second.stderr)
    assert len(refusals) == (4 if launcher == "torchrun" else 1), second.stderr
    process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
    while steps_logged(run) < 3 and process.poll() is None:
        time.sleep(0.005)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(children[-1]) if launcher == "one rank" else process.pid, signal.SIGTERM)
    _, said = process.communicate(timeout=120)
    stopped = int(re.search(r"stopped by SIGTERM after step ([0-9]+): ", " ".join(said.split())).group(1))
    assert process.returncode == (1 if launcher == "torchrun" else 143)
    assert names(run) == [f"step-{stopped:08d}"]
    again = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert again.returncode == 0, again.stderr
    check_same(trained_losses(run), trained_losses(alone["ladder"]), 1e-5)
