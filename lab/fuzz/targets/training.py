"""Checkpoints of training runs, damaged or forged, that ``train`` and ``adapt`` are to go on from.

A run that goes on must compute the losses of the undisturbed run. Where the checksums were made to fit (a forgery), the losses may
differ, and nothing else.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import pickle
import shutil
from pathlib import Path
from random import Random
from typing import Any

from lab.fuzz.box import Box
from lab.fuzz.judge import SilentError, check_model, require
from lab.fuzz.mutate import broken_json, mutate_bytes
from lab.fuzz.targets.text import good_corpus

STEPS = 6
EVERY = 2


class Payload:
    """Unpickled, it writes a file: the sign that code ran."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.write_text, (self.path, "code ran"))


def damage(checkpoint: Path, files: list[str], payload: Path, chance: Random) -> str:
    """Break one file of a checkpoint; its name."""
    name = chance.choice(files)
    path = checkpoint / name
    kind = chance.randrange(8)
    if kind == 0:
        path.unlink()
    elif kind == 1:
        path.write_bytes(pickle.dumps(Payload(payload)))
    elif path.suffix == ".json" and kind < 6:
        with contextlib.suppress(ValueError, RecursionError):  # broken already
            path.write_bytes(broken_json(json.loads(path.read_bytes()), chance))
    else:
        path.write_bytes(mutate_bytes(path.read_bytes(), chance))
    return name


def fingerprint_of(path: Path) -> list[Any]:
    return [path.stat().st_size, hashlib.sha256(path.read_bytes()).hexdigest()]


def reseal(manifest: Path) -> bool:
    """Make the checksums of ``manifest`` fit what lies beside it; whether that was possible."""
    try:
        document = json.loads(manifest.read_text(encoding="utf-8"))
        folder = manifest.parent
        document["files"] = {name: fingerprint_of(folder / name) for name in document["files"] if (folder / name).is_file()}
        manifest.write_text(json.dumps(document))
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return False
    return True


def judge(found: dict[int, float], expected: dict[int, float], forged: bool, payload: Path) -> None:
    if payload.exists():
        payload.unlink()
        raise SilentError("code of the checkpoint ran")
    require(bool(found), "no step was taken")
    require(min(found) > 1, "the run began again instead of going on")
    for step, loss in found.items():
        require(math.isfinite(loss), f"the loss of step {step} is {loss}")
        require(
            forged or math.isclose(loss, expected[step], rel_tol=1e-6),
            f"step {step} has the loss {loss}, undisturbed {expected[step]}",
        )


# ---- ladder train


def train_document(corpus: Path, directory: Path) -> dict[str, Any]:
    return {
        "name": "tiny",
        "model": dict(hidden_size=32, intermediate_size=48, num_layers=2, num_heads=2, vocab_size=512, wiring="ladder"),
        "data": dict(train=str(corpus), sequence=16),
        "batch": dict(rows=2),
        "optimizer": dict(lr=1e-2, warmup=1),
        "run": dict(steps=STEPS, precision="fp32", device="cpu", timeout=60.0),
        "checkpoint": dict(directory=str(directory), every=EVERY, keep=2, export=False, blocking=True),
        "log": dict(every=1, tensorboard=False),
    }


def losses_of_run(directory: Path) -> dict[int, float]:
    events = [json.loads(line) for line in (directory / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    return {event["step"]: event["loss"] for event in events if event["event"] == "train"}


def good_run(box: Box) -> tuple[Path, dict[int, float]]:
    """A run that stopped after step 5, with checkpoints of steps 2 and 4, and the losses of one that went on."""
    from ladder_residual.train.loop import train
    from ladder_residual.train.recipe import Recipe

    kept, whole = box.made / "run", box.made / "whole-run"
    if not kept.exists():
        corpus, box_run = good_corpus(box), box.path / "run"
        train(Recipe.from_dict(train_document(corpus, whole)), quiet=True)
        box.empty()
        train(Recipe.from_dict(train_document(corpus, box_run)), quiet=True, stop_after=STEPS - 1)
        shutil.copytree(box_run, kept)
    return kept, losses_of_run(whole)


def train_checkpoint(box: Box, chance: Random) -> None:
    """One or both checkpoints of a run, damaged: resumed, or exported."""
    from ladder_residual.models.loading import load_model
    from ladder_residual.train.export import export
    from ladder_residual.train.loop import train
    from ladder_residual.train.recipe import Recipe

    kept, expected = good_run(box)
    box.empty()
    run, payload = box.path / "run", box.path / "payload"
    shutil.copytree(kept, run)
    forged = False
    folders = sorted((run / "checkpoints").iterdir())
    for folder in folders if chance.random() < 0.3 else folders[-1:]:
        files = sorted(path.name for path in folder.iterdir())
        for _ in range(chance.choice([1, 1, 2])):
            name = damage(folder, [name for name in files if (folder / name).is_file()], payload, chance)
            forged |= name == "complete.json"  # what it says of the run may be anything
        if chance.random() < 0.5:
            forged |= reseal(folder / "complete.json")
    if chance.random() < 0.15:
        export(run, box.path / "exported")
        require(not payload.exists(), "code of the checkpoint ran")
        check_model(load_model(box.path / "exported"), box.path / "exported")
        return
    try:
        train(Recipe.from_dict(train_document(good_corpus(box), run)), quiet=True)
    finally:
        if payload.exists():
            judge({}, expected, forged, payload)
    found = losses_of_run(run)
    require(sorted(found) == sorted(expected), f"steps {sorted(found)} were logged, expected {sorted(expected)}")
    judge({step: loss for step, loss in found.items() if step > EVERY}, expected, forged, payload)


# ---- ladder adapt


def adapt_settings(box: Box, out: Path) -> Any:
    from ladder_residual.adapt.settings import AdaptSettings, DataSource

    small = dict(sequence=16, batch_tokens=32, tokens=32 * STEPS, save_every=EVERY, log_every=1, progress=False)
    data = (DataSource(str(box.made / "train.txt")),)
    student = str(box.made / "student")
    return AdaptSettings(student=student, method="sft", out=str(out), data=data, learning_rate=1e-3, **small)  # type: ignore[arg-type]


def good_adapt_run(box: Box) -> tuple[Path, dict[int, float]]:
    """A run that stopped after its checkpoint of step 4, and the losses of one that went on."""
    from ladder_residual.adapt.run import adapt
    from ladder_residual.adapt.trainer import AdaptTrainer
    from ladder_residual.bench.demo import demo_directory
    from ladder_residual.distributed.world import World
    from ladder_residual.models.convert import convert

    kept, whole = box.made / "adapt.training", box.made / "whole"
    if not kept.exists():
        convert(demo_directory(), box.made / "student", "ladder", copy=True)
        (box.made / "train.txt").write_bytes(box.good["stories.txt"][:2000])
        adapt(adapt_settings(box, whole), World(), lambda line: None)
        save = AdaptTrainer._save_checkpoint

        def stop_at_4(self: Any, *arguments: Any) -> None:
            save(self, *arguments)
            if self.state.global_step == 2 * EVERY:
                raise InterruptedError("as if killed")

        AdaptTrainer._save_checkpoint = stop_at_4  # type: ignore[assignment]
        box.empty()
        try:
            adapt(adapt_settings(box, box.path / "adapt"), World(), lambda line: None)
        except InterruptedError:
            shutil.copytree(box.path / "adapt.training", kept)
        finally:
            AdaptTrainer._save_checkpoint = save  # type: ignore[method-assign]
    return kept, losses_of_adapt(box.made / "whole.training")


def losses_of_adapt(folder: Path) -> dict[int, float]:
    entries = [json.loads(line) for line in (folder / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    return {entry["step"]: entry["loss"] for entry in entries if "loss" in entry}


def adapt_checkpoint(box: Box, chance: Random) -> None:
    from ladder_residual.adapt.run import adapt
    from ladder_residual.distributed.world import World

    kept, expected = good_adapt_run(box)
    box.empty()
    folder, payload = box.path / "adapt.training", box.path / "payload"
    shutil.copytree(kept, folder)
    forged = False
    found = sorted(folder.glob("checkpoint-*"))
    for checkpoint in found if chance.random() < 0.2 else found[-1:]:
        files = sorted(path.name for path in checkpoint.iterdir() if path.is_file())
        name = damage(checkpoint, files, payload, chance)
        manifest = checkpoint / "complete.json"
        forged |= name == manifest.name or not manifest.exists()
        if manifest.exists() and chance.random() < 0.25:
            forged |= reseal(manifest)
    if chance.random() < 0.1:
        (folder / "settings.json").write_bytes(broken_json(json.loads((folder / "settings.json").read_text()), chance))
    (folder / "log.jsonl").unlink()
    try:
        adapt(adapt_settings(box, box.path / "adapt"), World(), lambda line: None)
    finally:
        if payload.exists():
            judge({}, expected, forged, payload)
    judge(losses_of_adapt(folder), expected, forged, payload)
