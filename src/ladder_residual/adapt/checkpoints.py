"""Checkpoints of a recovery run on disk: ``OUT.training/checkpoint-N``, whole and with checksums (``train/manifest.py``), or absent."""

from __future__ import annotations

import dataclasses
import pickle
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel, TrainerState

from ..distributed.launch import is_out_of_memory
from ..distributed.world import World, tells_of_lost_peer
from ..models.checkpoint_reader import INDEX_BYTES, Checkpoint, read_json
from ..models.finite import check_weight
from ..models.parameters import check_parameters, read_parameter
from ..train.dcp_checkpoint import check_unpacked_size
from ..train.manifest import all_damaged, check_files, fingerprints, newest_good, read_manifest, set_aside, write_manifest

LATEST = "checkpoint-"


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix(LATEST))


def checkpoints(folder: Path) -> list[Path]:
    """Oldest first."""
    found = [path for path in folder.glob(f"{LATEST}*") if path.name.removeprefix(LATEST).isdecimal()]
    return sorted(found, key=step_of)


def last_checkpoint(folder: Path, before: int | None = None) -> Path | None:
    found = [path for path in checkpoints(folder) if before is None or step_of(path) < before]
    return found[-1] if found else None


def what_is_kept(folder: Path) -> str:
    newest = last_checkpoint(folder)
    return (
        f"{newest} is kept, and the same command goes on from there" if newest else "no checkpoint was saved yet (--save-every)"
    )


def checkpoint_to_resume(folder: Path, world: World, log: Callable[[str], None]) -> Path | None:
    """The newest good one, None if there is none at all; newer ones that are damaged are set aside. All ranks call it."""
    path, damaged = newest_good(checkpoints(folder), problem_of, world)
    if path is None and damaged:
        raise all_damaged(folder, damaged, "use --no-resume (it deletes them) or another --out")
    for other, problem in damaged.items():
        log(f"warning  {other} is damaged ({problem}): set aside, using the one before")
        if world.is_main:
            set_aside(other)
    world.barrier()
    return path


def problem_of(path: Path, share: int = 0, shares: int = 1) -> str:
    """What is wrong with (a share of) a checkpoint, "" if nothing is."""
    try:
        if read_manifest(path).get("step") != step_of(path):
            return "complete.json is that of another step"
        if problem := check_files(path, share, shares):
            return problem
        _check_trainer_state(path)
        for file in path.rglob("*"):
            if not file.is_file() and not file.is_dir():
                return f"{file.name} is not a file"  # a pipe is not waited for
            if file.suffix in (".pt", ".pth"):
                with file.open("rb") as content:
                    check_unpacked_size(content, file.stat().st_size, file.name)
    except (OSError, ValueError) as error:
        return str(error)
    return ""


def _check_trainer_state(path: Path) -> None:
    """The Trainer takes its ``trainer_state.json`` as it is."""
    state = read_json(path / "trainer_state.json", INDEX_BYTES)
    kinds: dict[str, Any] = {"log_history": list, "best_model_checkpoint": type(None)}
    kinds |= {"train_batch_size": int, "num_input_tokens_seen": int, "total_flos": int | float}
    if unknown := state.keys() - {field.name for field in dataclasses.fields(TrainerState)}:
        raise ValueError(f"trainer_state.json has an unknown field {min(unknown)!r:.60}")
    for name, kind in kinds.items():
        if not isinstance(state.get(name), kind):
            raise ValueError(f"trainer_state.json: {name} is {state.get(name)!r:.60}")
    if state.get("global_step") != step_of(path):
        raise ValueError(f"trainer_state.json is that of step {state.get('global_step')!r:.20}")


def complete(folder: Path, step: int, world: World) -> None:
    """Give a checkpoint its list of files; every rank reads its share of them."""
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    files = fingerprints(folder, names[world.rank :: world.size], world)
    if world.is_main:
        write_manifest(folder, files, {"step": step})


@contextmanager
def reading(checkpoint: str | Path) -> Iterator[None]:
    """Whatever the Trainer trips over in here is the checkpoint's fault."""
    try:
        yield
    except Exception as error:
        if is_out_of_memory(error) or tells_of_lost_peer(str(error)):
            raise
        reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]:.300}"
        if isinstance(error, pickle.UnpicklingError):  # torch would recommend to load it all the same
            reason = "it holds a pickled object that is no tensor, which is never read"
        raise ValueError(
            f"cannot resume from {checkpoint} ({reason}): delete it to use the one before, or begin again with --no-resume"
        ) from error


@torch.no_grad()
def load_weights(model: PreTrainedModel, checkpoint: Path) -> None:
    """As every command reads weights: safetensors of this directory alone, in the model's shapes, and finite."""
    stored = Checkpoint(checkpoint)
    check_parameters(model, stored)
    for name, parameter in model.named_parameters():
        parameter.copy_(read_parameter(stored, name, tuple(parameter.shape), None))
    stored.close()


def load_adapter(model: Any, checkpoint: Path) -> None:
    """The weights of LoRA's matrices; their settings are this run's."""
    from peft import get_peft_model_state_dict, set_peft_model_state_dict

    file = checkpoint / "adapter_model.safetensors"
    stored, expected = load_file(file), get_peft_model_state_dict(model)
    if different := sorted(stored.keys() ^ expected.keys()):
        raise ValueError(f"its adapter is not this model's: {different[0]:.80} is on one side only")
    for name, tensor in stored.items():
        if tensor.shape != expected[name].shape or not tensor.is_floating_point():
            raise ValueError(f"{name} of its adapter does not fit {list(expected[name].shape)}")
        check_weight(name, tensor, file)
    set_peft_model_state_dict(model, stored)


def read_optimizer(file: Path) -> dict[str, Any]:
    """The state in ``optimizer.pt``. An optimizer casts what it takes, so numbers must be there: a few bytes can stand for any shape."""
    stored = torch.load(file, map_location="cpu", weights_only=True)
    for moments in stored["state"].values():
        for name, value in moments.items():
            if isinstance(value, torch.Tensor) and value.nbytes > value.untyped_storage().nbytes():
                raise ValueError(f"{name!r:.60} of the optimizer has {list(value.shape)} numbers, which are not in the file")
    return stored


_MOMENTS = ({"exp_avg", "exp_avg_sq", "step"}, {"mean", "square", "step"}, {"momentum"})  # of AdamW, and of MuonWithAdamW


def check_moments(optimizer: torch.optim.Optimizer) -> None:
    """An optimizer takes any state, and would fail in its first step."""
    for parameter, moments in optimizer.state.items():
        if moments.keys() not in _MOMENTS:
            raise ValueError(f"the optimizer's state has {sorted(map(str, moments))}")
        for name, value in moments.items():
            shape = torch.Size() if name == "step" else parameter.shape
            if not isinstance(value, torch.Tensor) or value.shape != shape or not value.is_floating_point():
                raise ValueError(f"{name} of the optimizer does not fit a weight of {list(parameter.shape)}")


@contextmanager
def saving(scratch: Path, step: int, folder: Path, writer: bool) -> Iterator[None]:
    """Turns a failed write into one message that says what is still there, and clears what was half written."""
    from safetensors import SafetensorError

    if writer:
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        if writer:
            shutil.rmtree(scratch, ignore_errors=True)
        if tells_of_lost_peer(str(error)):
            raise  # the disk is fine
        good = last_checkpoint(folder)
        kept = f"{good} is intact" if good else "there is no earlier one"
        raise ValueError(f"could not save the checkpoint of step {step} in {folder} ({str(error)[:200]}); {kept}") from error
