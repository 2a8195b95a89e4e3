"""Checkpoints of a run in one process: saved on SIGTERM, damaged, and what the Trainer reads of them when it resumes, forged."""

import io
import json
import os
import random
import shutil
import signal
import traceback
import zipfile

import pytest
import torch
from peft import get_peft_model_state_dict
from safetensors.torch import load_file, save_file

from ladder_residual.adapt.checkpoints import saving
from ladder_residual.adapt.run import adapt
from ladder_residual.adapt.trainer import AdaptTrainer
from ladder_residual.common.locks import Lock
from ladder_residual.distributed.world import World
from tests.forged import Payload, damage, right_checksums
from tests.tiny_adapt import losses, run, settings, stop_after_a_checkpoint

OPTIONS = dict(tokens=512 * 3, save_every=1, heldout=())


@pytest.fixture(scope="module")
def stopped(ground):
    """Runs that ended after their first checkpoint, by method."""
    for method in ("distill", "lora"):
        assert stop_after_a_checkpoint(ground, f"stopped-{method}", method=method, **OPTIONS) == "stopped"
    return ground


@pytest.mark.parametrize(
    ("method", "file", "message"),
    [
        ("distill", "optimizer.pt", "a pickled object that is no tensor"),
        ("distill", "rng_state.pth", "a pickled object that is no tensor"),
        ("distill", "training_args.bin", None),  # written by the Trainer, and read by nobody
        ("distill", "pytorch_model.bin", None),
        ("lora", "adapter_model.bin", None),
        ("distill", "scheduler.pt", None),
        ("distill", "scaler.pt", None),
    ],
)
def test_nothing_in_a_forged_checkpoint_is_run(stopped, tmp_path, method, file, message):
    shutil.copytree(stopped / f"stopped-{method}.training", tmp_path / "run.training")
    (tmp_path / "run.training" / "settings.json").unlink()  # the run has another name here
    torch.save(Payload(tmp_path / "marker"), tmp_path / "run.training" / "checkpoint-1" / file)
    right_checksums(tmp_path / "run.training" / "checkpoint-1")
    options = OPTIONS | dict(method=method, out=str(tmp_path / "run"))
    if message is None:
        assert run(stopped, "run", **options).steps == 3
    else:
        with pytest.raises(ValueError, match=message) as caught:
            run(stopped, "run", **options)
        assert "\n" not in str(caught.value)
    assert not (tmp_path / "marker").exists()


def copied(stopped, folder, method="distill", **changes):
    """A stopped run under another name, and the settings that go on with it."""
    shutil.copytree(stopped / f"stopped-{method}.training", folder / "run.training", dirs_exist_ok=True)
    (folder / "run.training" / "settings.json").unlink()
    return OPTIONS | dict(method=method, out=str(folder / "run")) | changes


def by_an_index(checkpoint, file):
    """The weights in ``file``, which an index names."""
    weights = checkpoint / "model.safetensors"
    weight_map = dict.fromkeys(load_file(weights), file)
    weights.rename(checkpoint / file)
    name = "model.safetensors.index.json" if file.endswith(".safetensors") else "pytorch_model.bin.index.json"
    (checkpoint / name).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def with_nan(checkpoint):
    (file,) = checkpoint.glob("*.safetensors")
    weights = load_file(file)
    next(iter(weights.values())).view(-1)[3] = float("nan")
    save_file(weights, file, {"format": "pt"})


def compressed(checkpoint):
    good = zipfile.ZipFile(io.BytesIO((checkpoint / "optimizer.pt").read_bytes()))
    with zipfile.ZipFile(checkpoint / "optimizer.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        for entry in good.infolist():
            archive.writestr(entry.filename, good.read(entry) + bytes(1 << 20))


def expanded(checkpoint):
    """One number on disk, of any shape in memory once it is cast."""
    state = torch.load(checkpoint / "optimizer.pt", weights_only=True)
    state["state"][0]["exp_avg"] = torch.zeros(1, dtype=torch.float64).expand(10**6, 10**6)
    torch.save(state, checkpoint / "optimizer.pt")


def pipe(checkpoint):
    (checkpoint / "optimizer.pt").unlink()
    os.mkfifo(checkpoint / "optimizer.pt")


@pytest.mark.parametrize(
    ("method", "forge", "message"),
    [
        ("distill", compressed, "optimizer.pt unpacks to [0-9]+ bytes, and has [0-9]+"),
        ("distill", expanded, "exp_avg' of the optimizer has .1000000, 1000000. numbers, which are not in the file"),
        ("distill", pipe, "optimizer.pt is not a file"),
        ("distill", lambda checkpoint: by_an_index(checkpoint, "../outside.safetensors"), "not a file of this directory"),
        ("distill", lambda checkpoint: by_an_index(checkpoint, "weights.dat"), "only pickled weights"),
        ("distill", with_nan, "model.embed_tokens.weight holds NaN"),
        ("lora", with_nan, "lora_A.weight holds NaN"),
    ],
)
def test_weights_are_read_as_everywhere(stopped, tmp_path, method, forge, message):
    options = copied(stopped, tmp_path, method)
    checkpoint = tmp_path / "run.training" / "checkpoint-1"
    forge(checkpoint)
    right_checksums(checkpoint)
    kept = sorted(checkpoint.iterdir())
    with pytest.raises(ValueError, match=message):
        run(stopped, "run", **options)
    assert sorted(checkpoint.iterdir()) == kept


def test_a_folder_in_a_checkpoint_adds_no_adapter(stopped, tmp_path, monkeypatch):
    """Its settings would be a stranger's, and the run's own adapter would be left out."""
    options = copied(stopped, tmp_path, "lora")
    checkpoint = tmp_path / "run.training" / "checkpoint-1"
    (checkpoint / "evil").mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        shutil.copy(checkpoint / name, checkpoint / "evil" / name)
    right_checksums(checkpoint)
    stored, step = load_file(checkpoint / "adapter_model.safetensors"), AdaptTrainer.training_step

    def first_step(trainer, *arguments):
        assert set(trainer.model.peft_config) == {"default"}
        now = get_peft_model_state_dict(trainer.model)
        assert all(torch.equal(now[name], tensor) for name, tensor in stored.items())
        monkeypatch.setattr(AdaptTrainer, "training_step", step)
        return step(trainer, *arguments)

    monkeypatch.setattr(AdaptTrainer, "training_step", first_step)
    assert run(stopped, "run", **options).steps == 3
    assert AdaptTrainer.training_step is step


class Loaded(BaseException):
    pass


@pytest.mark.parametrize("method", ["distill", "lora"])
def test_any_damage_or_forgery_is_one_line(stopped, tmp_path, monkeypatch, method):
    """In any file, with the checksum made right again or not: the run goes on, or says in one line of ours why not."""
    chosen = settings(stopped, "run", **copied(stopped, tmp_path, method))
    step, refused = AdaptTrainer.training_step, 0

    def first_step(trainer, *arguments):
        step(trainer, *arguments)
        trainer.optimizer.step()
        raise Loaded

    monkeypatch.setattr(AdaptTrainer, "training_step", first_step)
    for seed in range(12):
        shutil.rmtree(tmp_path / "run.training" / "checkpoint-1")
        shutil.copytree(stopped / f"stopped-{method}.training" / "checkpoint-1", tmp_path / "run.training" / "checkpoint-1")
        done = damage(tmp_path / "run.training" / "checkpoint-1", random.Random(seed))
        try:
            adapt(chosen, World(), lambda line: None)
        except Loaded:
            continue
        except ValueError as error:
            refused += 1
            assert "\n" not in str(error), (seed, done)
            assert "ladder_residual" in traceback.extract_tb(error.__traceback__)[-1].filename, (seed, done)
    assert refused > 3


def signal_in_step(monkeypatch, number, which):
    step = AdaptTrainer.training_step

    def with_signal(trainer, *arguments):
        if trainer.state.global_step + 1 == number:
            os.kill(os.getpid(), which)
        return step(trainer, *arguments)

    monkeypatch.setattr(AdaptTrainer, "training_step", with_signal)


@pytest.mark.parametrize("last", [2, 3])
def test_sigterm_saves_and_the_run_goes_on_bit_for_bit(ground, tmp_path, monkeypatch, last):
    """Also in the last step, before the result is written."""
    name, options = f"terminated-{last}", dict(tokens=512 * 3, heldout=())
    if not (ground / "untouched").exists():
        run(ground, "untouched", **options)
    before, said = signal.getsignal(signal.SIGTERM), []
    with monkeypatch.context() as patch:
        signal_in_step(patch, last, signal.SIGTERM)
        result = adapt(settings(ground, name, **options), World(), said.append)
    assert (result.stopped, result.steps, signal.getsignal(signal.SIGTERM)) == (True, last, before)
    assert f"stopped  by SIGTERM after step {last}: " in said[-1]
    assert f"checkpoint-{last} is kept, and the same command goes on" in said[-1]
    assert not (ground / name).exists()
    result = adapt(settings(ground, name, **options), World(), said.append)
    assert (result.stopped, result.steps) == (False, 3)
    assert losses(ground, name) == losses(ground, "untouched")
    weights = "model.safetensors"
    assert (ground / name / weights).read_bytes() == (ground / "untouched" / weights).read_bytes()


def test_the_command_ends_as_a_scheduler_expects(ground, monkeypatch):
    from typer.testing import CliRunner

    from ladder_residual.cli.main import app

    signal_in_step(monkeypatch, 1, signal.SIGTERM)
    words = ["adapt", ground / "ladder", "--method", "sft", "--data", ground / "train.txt", "--out", ground / "command"]
    words += ["--sequence", 64, "--batch-tokens", 512, "--tokens", 1536, "--device", "cpu"]
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == 143
    assert "stopped  by SIGTERM after step 1" in result.stderr


def test_ctrl_c_says_what_was_kept(ground, monkeypatch):
    said = []
    signal_in_step(monkeypatch, 3, signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        adapt(settings(ground, "interrupted", **OPTIONS), World(), said.append)
    assert "interrupted after step 2: " in said[-1]
    assert "checkpoint-2 is kept" in said[-1]


def test_a_damaged_checkpoint_is_set_aside_and_the_one_before_is_used(ground, tmp_path, monkeypatch):
    options = OPTIONS | dict(out=str(tmp_path / "run"))
    with monkeypatch.context() as patch:
        signal_in_step(patch, 2, signal.SIGTERM)
        assert run(ground, "run", **options).stopped
    newest = tmp_path / "run.training" / "checkpoint-2"
    weights = newest / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    said = []
    assert adapt(settings(ground, "run", **options), World(), said.append).steps == 3
    assert f"warning  {newest} is damaged (the checksum of model.safetensors is wrong): set aside, using the one before" in said
    assert newest.with_name("checkpoint-2.damaged").is_dir()


def test_a_run_whose_checkpoints_are_all_damaged_stops_and_changes_nothing(stopped, tmp_path):
    options = copied(stopped, tmp_path)
    (tmp_path / "run.training" / "checkpoint-1" / "complete.json").unlink()
    log = (tmp_path / "run.training" / "log.jsonl").read_bytes()
    with pytest.raises(
        ValueError, match="every checkpoint .*checkpoint-1: complete.json is missing.*use --no-resume"
    ) as caught:
        run(stopped, "run", **options)
    assert "\n" not in str(caught.value)
    assert (tmp_path / "run.training" / "log.jsonl").read_bytes() == log
    assert (tmp_path / "run.training" / "checkpoint-1").is_dir()
    assert run(stopped, "run", **options | dict(resume=False)).steps == 3


@pytest.mark.parametrize(
    ("failure", "kind", "message"),
    [
        (RuntimeError("Read error [127.0.0.1]:4480: Connection reset by peer"), RuntimeError, "^Read error"),  # not of the disk
        (OSError(28, "No space left on device"), ValueError, "could not save the checkpoint of step 4 .*No space left"),
    ],
)
def test_a_peer_lost_while_saving_is_not_the_disk(tmp_path, failure, kind, message):
    with pytest.raises(kind, match=message), saving(tmp_path / ".saving", 4, tmp_path, True):
        raise failure
    assert list(tmp_path.iterdir()) == []


def test_a_second_run_is_refused(ground):
    (ground / "twice.training").mkdir()
    with (
        Lock(ground / "twice.training"),
        pytest.raises(ValueError, match=f"twice.training is in use by process {os.getpid()} on"),
    ):
        run(ground, "twice")
    assert not list((ground / "twice.training").iterdir())
