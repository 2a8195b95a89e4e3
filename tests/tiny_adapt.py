"""A recovery run small enough for tests."""

import contextlib
import json

from ladder_residual.adapt.run import adapt
from ladder_residual.adapt.settings import AdaptSettings, DataSource
from ladder_residual.adapt.trainer import AdaptTrainer
from ladder_residual.distributed.world import World

FAST = dict(
    sequence=64, batch_tokens=512, tokens=512 * 12, learning_rate=2e-3, log_every=1, progress=False, evaluate_tokens=2048
)


def settings(ground, name, **changes):
    defaults = dict(
        student=str(ground / "ladder"),
        teacher=str(ground / "original"),
        out=str(ground / name),
        data=(DataSource(str(ground / "train.txt")),),
        heldout=(str(ground / "heldout.txt"),),
    )
    return AdaptSettings(**defaults | FAST | changes)


def run(ground, name, world=None, **changes):
    return adapt(settings(ground, name, **changes), world or World(), lambda line: None)


def log_entries(ground, name):
    path = ground / f"{name}.training" / "log.jsonl"
    found = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        with contextlib.suppress(ValueError):  # a line that was being written when its writer was killed
            found.append(json.loads(line))
    return found


def losses(ground, name):
    return {entry["step"]: entry["loss"] for entry in log_entries(ground, name)}


def stop_after_a_checkpoint(ground, name, world=None, **changes):
    """A run that ends early as if killed: after its first checkpoint, before its result."""
    save = AdaptTrainer._save_checkpoint

    def saved(self, *arguments):
        save(self, *arguments)
        raise InterruptedError("enough")

    AdaptTrainer._save_checkpoint = saved
    try:
        run(ground, name, world, **changes)
    except InterruptedError:
        return "stopped"
    finally:
        AdaptTrainer._save_checkpoint = save
