"""Recovery in real processes: killed and resumed, on two ranks with DDP and FSDP2, from the command line and from recipes."""

import json
import os
import random
import re
import shlex
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
from ladder_residual.adapt.checkpoints import last_checkpoint
from ladder_residual.adapt.run import adapt
from ladder_residual.adapt.settings import read_recipe
from ladder_residual.adapt.trainer import AdaptTrainer
from ladder_residual.models.loading import load_model
from tests.forged import Payload, forge_metadata, right_checksums
from tests.ranks import run_on_ranks
from tests.tiny_adapt import log_entries, losses, run, settings, stop_after_a_checkpoint

ROOT = Path(__file__).parents[2]
STEPS = 14
FAST = dict(tokens=512 * 4, learning_rate=1e-3, save_every=2, heldout=())


@pytest.mark.slow
def test_a_killed_run_goes_on_to_the_same_losses(ground):
    """The command, killed at any step and started again, against a run that nobody disturbed."""
    student = ground / "half"
    options = dict(tokens=512 * STEPS, learning_rate=1e-3, save_every=2, hidden_weight=0.5, stages=("ladder:4",))
    run(ground, "undisturbed", student=str(student), evaluate_tokens=65_536, **options)
    expected = losses(ground, "undisturbed")
    assert list(expected) == list(range(1, STEPS + 1))

    command = f"""adapt {student} --teacher {ground / "original"} --data {ground / "train.txt"} --heldout {ground / "heldout.txt"}
        --out {ground / "killed"} --sequence 64 --batch-tokens 512 --tokens {512 * STEPS} --lr 1e-3 --save-every 2 --log-every 1
        --device cpu --hidden-weight 0.5 --stage ladder:4"""
    words = [sys.executable, "-m", "ladder_residual", *shlex.split(command)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    step = random.SystemRandom().randrange(3, STEPS - 1)
    process = subprocess.Popen(words, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 200
    while len(losses(ground, "killed")) < step and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    seen = len(log_entries(ground, "killed"))
    assert not (ground / "killed").exists(), f"it was to die at step {step}, but had finished"
    again = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=240)
    assert again.returncode == 0, again.stderr[-2000:]
    assert "resume   " in again.stderr
    assert "heldout.txt: held-out loss " in again.stdout
    first = log_entries(ground, "killed")[seen]["step"]
    assert first > 1, "it began again instead of going on"
    assert losses(ground, "killed") == expected, f"killed at step {step}, resumed at {first}"
    for name, tensor in load_model(ground / "undisturbed").state_dict().items():
        assert torch.equal(tensor, load_model(ground / "killed").state_dict()[name]), name


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
        run(ground, name, world, student=str(ground / "half"), **FAST | changes)
    finally:
        run_module.build_trainer = build
    return held


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_ranks_train_as_one(ground, parallel):
    if not (ground / "one").exists():
        run(ground, "one", student=str(ground / "half"), data_weight=0.3, hidden_weight=0.5, **FAST)
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
    return stop_after_a_checkpoint(ground, name, world, student=str(ground / "half"), **FAST | changes)


@pytest.mark.slow
def test_shards_resume_exactly(ground):
    changes = dict(parallel="fsdp", micro_rows=2)
    run_on_ranks(2, _two_ranks, ground, "unbroken", changes)
    assert run_on_ranks(2, _stop_after_a_checkpoint, ground, "broken", changes) == ["stopped", "stopped"]
    assert max(losses(ground, "broken")) == 2
    run_on_ranks(2, _two_ranks, ground, "broken", changes)
    assert losses(ground, "broken") == losses(ground, "unbroken")


def _stopped_by_one_rank(world, ground, name, changes):
    """Only rank 1 gets the signal; both stop at the same step. Then the newest checkpoint is damaged, and the run goes on."""
    step, said = AdaptTrainer.training_step, []

    def with_signal(trainer, *arguments):
        if trainer.state.global_step == 1 and world.rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(trainer, *arguments)

    chosen = settings(ground, name, student=str(ground / "half"), **FAST | dict(tokens=512 * 5, save_every=1) | changes)
    AdaptTrainer.training_step = with_signal
    try:
        first = adapt(chosen, world, said.append)
    finally:
        AdaptTrainer.training_step = step
    newest = last_checkpoint(ground / f"{name}.training")
    world.barrier()
    if world.is_main:
        data = next(newest.rglob("rng_state_1.pth"))
        data.write_bytes(data.read_bytes()[:-1])
    world.barrier()
    second = adapt(chosen, world, said.append)
    return (first.stopped, first.steps), (second.stopped, second.steps), said


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_ranks_stop_at_the_same_step_and_go_on(ground, parallel):
    changes, name = dict(parallel=parallel, micro_rows=2), f"stopped-{parallel}"
    results = run_on_ranks(2, _stopped_by_one_rank, ground, name, changes)
    assert [result[:2] for result in results] == [((True, 3), (False, 5))] * 2
    said = "\n".join(results[0][2])
    assert "stopped  by SIGTERM after step 3: " in said
    assert re.search(r"checkpoint-3 is damaged \(rank [01]: rng_state_1.pth has ", said)
    assert f"resume   {ground / name}.training/checkpoint-2" in said
    run_on_ranks(2, _two_ranks, ground, f"straight-{parallel}", changes | dict(tokens=512 * 5))
    assert losses(ground, name) == losses(ground, f"straight-{parallel}")


def _resume_forged(world, ground, marker):
    assert _stop_after_a_checkpoint(world, ground, "forged", dict(parallel="fsdp")) == "stopped"
    errors = []
    for kind in ("bytes", "pickle"):
        if world.is_main:
            forge_metadata(ground / "forged.training" / "checkpoint-2" / "sharded_state", kind, marker)
        world.barrier()
        with pytest.raises(ValueError, match="no list of a checkpoint's tensors") as caught:
            run(ground, "forged", world, student=str(ground / "half"), parallel="fsdp", **FAST)
        errors.append(str(caught.value))
    return errors


def test_forged_shards_are_not_resumed(ground, tmp_path):
    for errors in run_on_ranks(2, _resume_forged, ground, tmp_path / "marker"):
        assert "\n" not in "".join(errors)
    assert not (tmp_path / "marker").exists()


def _resume_forged_copies(world, ground, marker):
    name, options = "forged-copies", dict(parallel="ddp")
    assert _stop_after_a_checkpoint(world, ground, name, options) == "stopped"
    checkpoint, errors = ground / f"{name}.training" / "checkpoint-2", []
    for files in (["optimizer.pt"], ["rng_state_0.pth", "rng_state_1.pth"]):
        kept = {file: (checkpoint / file).read_bytes() for file in files}
        world.barrier()
        if world.is_main:
            for file in files:
                torch.save(Payload(marker), checkpoint / file)
            right_checksums(checkpoint)
        world.barrier()
        with pytest.raises(ValueError, match="a pickled object that is no tensor") as caught:
            run(ground, name, world, student=str(ground / "half"), **options, **FAST)
        errors.append(str(caught.value))
        world.barrier()
        for file in files if world.is_main else ():
            (checkpoint / file).write_bytes(kept[file])
    return errors


def test_forged_copies_are_not_resumed(ground, tmp_path):
    """With DDP every rank reads the optimizer's state, and a random state of its own."""
    for errors in run_on_ranks(2, _resume_forged_copies, ground, tmp_path / "marker"):
        assert "\n" not in "".join(errors)
    assert not (tmp_path / "marker").exists()


def test_fsdp_alone_is_refused(ground):
    with pytest.raises(ValueError, match="needs several ranks"):
        run(ground, "alone", parallel="fsdp")


def _recipe_on_ranks(world, path, overrides):
    result = adapt(read_recipe(path, overrides), world, lambda line: None)
    (text,) = result.after
    return result.steps, result.before[text]["loss"], result.after[text]["loss"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adapt-paper-llama-3.1-8b", "adapt-distill-llama-3.1-8b"])
def test_recipes_for_eight_gpus_run_small_on_two_ranks(ground, tmp_path, name):
    """All that such a recipe switches on (shards, compiled layers, checkpointed activations, answers alone), with less to do."""
    for model in ("original", "ladder"):
        shutil.copytree(ground / model, tmp_path / model)
        template = "{% for m in messages %}{{ m['content'] }}<|endoftext|>{% endfor %}"
        (tmp_path / model / "chat_template.jinja").write_text(template, encoding="utf-8")
    for text in ("train", "heldout"):
        stories = (ground / f"{text}.txt").read_text(encoding="utf-8").split("<|endoftext|>")
        chats = [{"prompt": "Tell me a story.", "completion": story.strip()[:200]} for story in stories if len(story) > 200]
        lines = "".join(json.dumps(chat) + "\n" for chat in chats)
        (tmp_path / f"{text}.jsonl").write_text(lines, encoding="utf-8")
    small = {"student": str(tmp_path / "ladder"), "teacher": str(tmp_path / "original"), "out": str(tmp_path / "recovered")}
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
