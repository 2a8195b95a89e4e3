"""Healing in real processes: killed and resumed, on two ranks with DDP and FSDP2, from the command line and from recipes."""

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import DTensor

from ladder_residual.adapt import run as run_module
from ladder_residual.adapt.run import adapt
from ladder_residual.adapt.settings import Settings, Source, read_recipe
from ladder_residual.convert import convert
from ladder_residual.loading import load_model
from ladder_residual.parallel import World
from ranks import run_on_ranks

ROOT = Path(__file__).parents[1]
STEPS = 14
FAST = dict(sequence=64, batch_tokens=512, tokens=512 * 4, learning_rate=1e-3, log_every=1, progress=False, save_every=2)


@pytest.fixture(scope="module")
def ground(demo_dir, tmp_path_factory):
    folder = tmp_path_factory.mktemp("processes")
    convert(demo_dir, folder / "original", "standard", copy=True)
    convert(folder / "original", folder / "ladder", "ladder:last-half")
    stories = (demo_dir / "stories.txt").read_text(encoding="utf-8").replace("\n\n", "\n<|endoftext|>\n")
    (folder / "train.txt").write_text(stories[:20000], encoding="utf-8")
    (folder / "heldout.txt").write_text(stories[20000:], encoding="utf-8")
    return folder


def entries(ground, name):
    path = ground / f"{name}.training" / "log.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    found = []
    for line in lines:
        with contextlib.suppress(ValueError):  # a line that was being written when its writer was killed
            found.append(json.loads(line))
    return found


def losses(ground, name):
    return {entry["step"]: entry["loss"] for entry in entries(ground, name)}


def command(ground, name):
    words = ["adapt", str(ground / "ladder"), "--teacher", str(ground / "original"), "--data", str(ground / "train.txt")]
    words += ["--out", str(ground / name), "--sequence", "64", "--batch-tokens", "512", "--tokens", str(512 * STEPS)]
    words += [
        "--lr",
        "1e-3",
        "--save-every",
        "2",
        "--log-every",
        "1",
        "--device",
        "cpu",
        "--heldout",
        str(ground / "heldout.txt"),
    ]
    words += ["--hidden-weight", "0.5", "--stage", "ladder:4"]
    return [sys.executable, "-m", "ladder_residual", *words]


def test_a_killed_run_goes_on_to_the_same_losses(ground):
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    whole = subprocess.run(command(ground, "whole"), env=environment, capture_output=True, text=True, timeout=240)
    assert whole.returncode == 0, whole.stderr[-2000:]
    assert "heldout.txt: loss" in whole.stdout
    expected = losses(ground, "whole")
    assert list(expected) == list(range(1, STEPS + 1))

    step = random.SystemRandom().randrange(3, STEPS - 1)
    process = subprocess.Popen(command(ground, "killed"), env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 200
    while len(losses(ground, "killed")) < step and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    seen = len(entries(ground, "killed"))
    assert not (ground / "killed").exists(), f"it was to die at step {step}, but had finished"
    again = subprocess.run(command(ground, "killed"), env=environment, capture_output=True, text=True, timeout=240)
    assert again.returncode == 0, again.stderr[-2000:]
    assert "resume   " in again.stderr
    first = entries(ground, "killed")[seen]["step"]
    assert first > 1, "it began again instead of going on"
    assert losses(ground, "killed") == expected, f"killed at step {step}, resumed at {first}"
    for name, tensor in load_model(ground / "whole").state_dict().items():
        assert torch.equal(tensor, load_model(ground / "killed").state_dict()[name]), name


def settings(ground, name, **changes):
    return Settings(
        **dict(
            student=str(ground / "ladder"),
            teacher=str(ground / "original"),
            out=str(ground / name),
            data=(Source(str(ground / "train.txt")),),
        )
        | FAST
        | changes
    )


def _two_ranks(world, ground, name, changes):
    """What a rank holds of the weights while it trains, and the run itself."""
    held = {}
    build = run_module.build_trainer

    def look(*arguments):
        trainer = build(*arguments)
        parameters = list(trainer.inner.parameters())
        held["sharded"] = all(isinstance(parameter, DTensor) for parameter in parameters)
        held["teacher sharded"] = trainer.teacher is not None and all(
            isinstance(p, DTensor) for p in trainer.teacher.parameters()
        )
        held["elements"] = sum((p.to_local() if isinstance(p, DTensor) else p).numel() for p in parameters)
        held["whole"] = sum(parameter.numel() for parameter in parameters)
        return trainer

    run_module.build_trainer = look
    try:
        adapt(settings(ground, name, **changes), world, lambda line: None)
    finally:
        run_module.build_trainer = build
    return held


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_ranks_train_as_one(ground, parallel):
    if not (ground / "one").exists():
        adapt(settings(ground, "one", method="distill", data_weight=0.3, hidden_weight=0.5), World(), lambda line: None)
    changes = dict(parallel=parallel, data_weight=0.3, hidden_weight=0.5, micro_rows=2)
    held = run_on_ranks(2, _two_ranks, ground, parallel, changes)
    for rank in held:
        assert rank["sharded"] == rank["teacher sharded"] == (parallel == "fsdp")
        if parallel == "fsdp":
            assert rank["elements"] < 0.6 * rank["whole"]
    one, two = losses(ground, "one"), losses(ground, parallel)
    assert list(two.values()) == pytest.approx(list(one.values()), rel=2e-5)
    ours, theirs = load_model(ground / parallel).state_dict(), load_model(ground / "one").state_dict()
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=1e-3, atol=2e-4, msg=lambda text, name=name: f"{name}: {text}")


def _stop_after_a_checkpoint(world, ground, name, changes):
    """A run that ends early as if killed: after its first checkpoint, before its result."""
    from ladder_residual.adapt.trainer import AdaptTrainer

    save = AdaptTrainer._save_checkpoint

    def saved(self, *arguments):
        save(self, *arguments)
        raise InterruptedError("enough")

    AdaptTrainer._save_checkpoint = saved
    try:
        adapt(settings(ground, name, **changes), world, lambda line: None)
    except InterruptedError:
        return "stopped"
    finally:
        AdaptTrainer._save_checkpoint = save


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["fsdp"])
def test_shards_resume_exactly(ground, parallel):
    changes = dict(parallel=parallel, micro_rows=2)
    run_on_ranks(2, _two_ranks, ground, "unbroken", changes)
    assert run_on_ranks(2, _stop_after_a_checkpoint, ground, "broken", changes) == ["stopped", "stopped"]
    assert max(losses(ground, "broken")) == 2
    run_on_ranks(2, _two_ranks, ground, "broken", changes)
    assert losses(ground, "broken") == losses(ground, "unbroken")


def test_fsdp_alone_is_refused(ground):
    with pytest.raises(ValueError, match="needs several ranks"):
        adapt(settings(ground, "alone", parallel="fsdp"), World(), lambda line: None)


@pytest.mark.parametrize("path", sorted(ROOT.glob("recipes/adapt-*.toml")), ids=lambda path: path.stem)
def test_recipes_are_complete(path):
    recipe = read_recipe(path)
    assert recipe.teacher
    assert recipe.data
    shown = subprocess.run(
        [sys.executable, "-m", "ladder_residual", "adapt", str(path), "--show"], capture_output=True, text=True, timeout=60
    )
    assert json.loads(shown.stdout)["learning_rate"] == recipe.learning_rate


def _recipe_on_ranks(world, path, overrides):
    result = adapt(read_recipe(path, overrides), world, lambda line: None)
    (text,) = result.after
    return result.steps, result.before[text]["loss"], result.after[text]["loss"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adapt-paper-llama-3.1-8b", "adapt-distill-llama-3.1-8b"])
def test_recipes_for_eight_gpus_run_small_on_two_ranks(ground, tmp_path, name):
    """All that such a recipe switches on (shards, compiled blocks, checkpointed activations, answers alone), with less to do."""
    for model in ("original", "ladder"):
        shutil.copytree(ground / model, tmp_path / model)
        template = "{% for m in messages %}{{ m['content'] }}<|endoftext|>{% endfor %}"
        (tmp_path / model / "chat_template.jinja").write_text(template, encoding="utf-8")
    for text in ("train", "heldout"):
        stories = (ground / f"{text}.txt").read_text(encoding="utf-8").split("<|endoftext|>")
        chats = [{"prompt": "Tell me a story.", "completion": story.strip()[:200]} for story in stories if len(story) > 200]
        lines = "".join(json.dumps(chat) + "\n" for chat in chats)
        (tmp_path / f"{text}.jsonl").write_text(lines, encoding="utf-8")
    small = {"student": str(tmp_path / "ladder"), "teacher": str(tmp_path / "original"), "out": str(tmp_path / "healed")}
    small |= {"sequence": 128, "batch_tokens": 512, "learning_rate": 1e-3, "warmup": 0.1, "precision": "fp32"}
    small |= {"data": [{"path": str(tmp_path / "train.jsonl")}], "heldout": [str(tmp_path / "heldout.jsonl")]}
    small |= {"progress": False, "save_every": 4}
    if "tokens" in tomllib.loads((ROOT / "recipes" / f"{name}.toml").read_text(encoding="utf-8")):
        small["tokens"] = 512 * 6
    first, second = run_on_ranks(2, _recipe_on_ranks, ROOT / "recipes" / f"{name}.toml", small)
    assert first == second
    steps, before, after = first
    assert steps >= 4
    assert after < before


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("studnet = 'x'", r"unknown key 'studnet' \(did you mean 'student'\?\)"),
        ("student = 'x'\ntokens = 'many'", "tokens must be of type int"),
        ("student = 'x'\nmethod = 'magic'\nteacher='y'", "choose from distill, sft, lora"),
        ("student = 'x'", "name it with teacher"),
        ("teacher = 'x'", "student is missing"),
        (
            "student = 'x'\nteacher = 'y'\nsequence = 100\nbatch_tokens = 1000\n[[data]]\nweight = 2",
            "a table with path and weight",
        ),
        ("student = 'x'\nteacher = 'y'\nsequence = 300\nbatch_tokens = 1000", "use 900"),
        (
            "student = 'x'\nteacher = 'y'\nheldout = ['./a.txt']\n[[data]]\npath = 'a.txt'",
            r"./a.txt is both trained on \(data\) and measured on \(heldout\)",
        ),
        ("student = 'x'\nteacher = 'y'\ncontrol = true", "would learn from itself, and nothing: use method sft"),
        ("student = 'x'\nteacher = 'y'\nkeep = 1", "keep=1 is one checkpoint"),
        ("student = ", "not a readable recipe"),
    ],
)
def test_mistakes_in_recipes_are_named(tmp_path, content, message):
    path = tmp_path / "recipe.toml"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        read_recipe(path)
