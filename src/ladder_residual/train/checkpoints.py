"""Checkpoints that are there whole or not at all.

Each rank copies its shards to the CPU and goes on training; a thread writes them (``dcp_checkpoint.py``) into
``step-00000100.tmp``, then the sizes and checksums of all files into ``complete.json``, and renames the directory. What a crash leaves
behind has no such name. When a run is resumed the newest checkpoint whose files match their checksums is taken, on any layout; damaged
ones are set aside, so that their steps are saved again. If all are damaged, the run stops and touches nothing.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..common.files import sync
from ..distributed.sockets import PeerLost
from ..distributed.world import World, tells_of_lost_peer
from ..models.chunks import chunks_of, local_of
from .dcp_checkpoint import METADATA, ShardOfWhole, load_tensors, root_cause, save_tensors
from .layout import Layout
from .manifest import MANIFEST, all_damaged, check_files, fingerprints, newest_good, read_manifest, set_aside, write_manifest
from .model import ModelWithLoss, trained_wiring
from .optimizer import ShardedAdamW
from .recipe import Recipe

_NAME = re.compile(r"step-([0-9]{8})")


class SaveFailed(ValueError):
    """A checkpoint could not be written; those before it are untouched."""


class Checkpoints:
    """Of one run directory. All ranks call every method together."""

    def __init__(self, directory: Path, layout: Layout, *, keep: int) -> None:
        self.directory, self.layout, self.keep = directory, layout, keep
        world = layout.world
        # The writing threads of the ranks talk while the main threads train: they need a group of their own.
        patience = timedelta(seconds=layout.timeout)
        group = dist.new_group(backend="gloo", timeout=patience) if world.size > 1 else None
        self.writers = World(world.rank, world.size, group=group)
        self.thread = ThreadPoolExecutor(1)
        self.writing: Future[None] | None = None
        if world.is_main:
            directory.mkdir(parents=True, exist_ok=True)
            for leftover in directory.glob("*.tmp"):
                shutil.rmtree(leftover, ignore_errors=True)
        world.barrier()

    def any(self) -> bool:
        """Damaged ones too."""
        return bool(_directories(self.directory))

    def newest(self) -> Path | None:
        found = complete_checkpoints(self.directory)
        return found[-1] if found else None

    def save(
        self, step: int, trained: ModelWithLoss, optimizer: ShardedAdamW, recipe: Recipe, about: dict[str, Any], *, wait: bool
    ) -> None:
        self.wait()
        if (self.directory / f"step-{step:08d}" / MANIFEST).exists():
            return  # saved already: the run was resumed from it
        state = training_state(trained, optimizer, copy=True)
        state[f"random.{self.layout.world.rank}"] = random_state(self.layout.device)
        world = self.layout.world
        manifest = {
            "step": step,
            "ranks": world.size,
            "dp": self.layout.dp,
            "tp": self.layout.tp,
            "recipe": recipe.to_dict(),
            **about,
        }
        self.writing = self.thread.submit(self._write, step, state, manifest)
        if wait:
            self.wait()

    def wait(self) -> None:
        """Until the checkpoint under way is on disk; raises what went wrong with it."""
        if self.writing is not None:
            writing, self.writing = self.writing, None
            writing.result()

    def close(self) -> None:
        self.thread.shutdown(wait=True)

    def _write(self, step: int, state: dict[str, Tensor], manifest: dict[str, Any]) -> None:
        final = self.directory / f"step-{step:08d}"
        temporary = final.with_suffix(".tmp")
        rank = self.writers.rank
        try:
            if rank == 0:
                temporary.mkdir(parents=True)
            self.writers.barrier()
            save_tensors(state, temporary, self.writers.group)
            mine = [path.name for path in temporary.glob(f"__{rank}_*")] + [METADATA] * (rank == 0)
            files = fingerprints(temporary, mine, self.writers)
            if rank == 0:
                write_manifest(temporary, files, manifest)
                if final.exists():
                    shutil.rmtree(final)  # without its list of files: the rest of a deletion that was cut off
                os.replace(temporary, final)
                sync(self.directory)
                self._retire()
        except Exception as error:
            if rank == 0:
                shutil.rmtree(temporary, ignore_errors=True)  # gives the space back as well
            newest = self.newest()
            rest = f"the newest good checkpoint is {newest}" if newest else "there is no earlier checkpoint"
            reason = _reason(error, self.directory)
            if tells_of_lost_peer(reason):
                raise PeerLost(f"rank {rank} lost its peers while it saved step {step}: {reason}; {rest}") from error
            raise SaveFailed(f"could not save step {step} to {final}: {reason}; {rest}") from error

    def _retire(self) -> None:
        for old in complete_checkpoints(self.directory)[: -self.keep]:
            (old / MANIFEST).unlink()  # first of all, so that a half-deleted one is not taken for a checkpoint
            shutil.rmtree(old, ignore_errors=True)

    def load(
        self, trained: ModelWithLoss, optimizer: ShardedAdamW, recipe: Recipe, data: str, say: Callable[[str], None]
    ) -> int:
        """Restore the newest good checkpoint into the model and the optimizer; the step to go on from, 0 if there is none.
        ValueError if all are damaged. ``data``: the fingerprint of what is trained on."""
        world = self.layout.world
        path, damaged = newest_good(_directories(self.directory), problem_of, world)
        if path is None:
            if damaged:
                raise all_damaged(
                    self.directory, damaged, "move that directory away or give another one, --set checkpoint.directory=NEW"
                )
            return 0
        world.check_same(f"the checkpoint {path}", (path / MANIFEST).read_text(encoding="utf-8"))
        manifest = read_training_manifest(path)
        _check_same_run(manifest, recipe, data, path)
        state = training_state(trained, optimizer, copy=False)
        key = f"random.{world.rank}"
        if manifest["ranks"] == world.size:
            state[key] = random_state(self.layout.device)
        load_tensors(state, path, self.writers.group)
        if key in state:
            set_random_state(state[key], self.layout.device)
        optimizer.set_steps(manifest["step"])
        for other, problem in damaged.items():
            say(f"{other} is damaged ({problem}): set aside, using the one before")
            if world.is_main:
                set_aside(other)
        layout = f"dp {manifest['dp']} x tp {manifest['tp']}"
        say(f"resumed from {path} (step {manifest['step']}, written by {layout})")
        world.barrier()
        return manifest["step"]


def complete_checkpoints(directory: Path) -> list[Path]:
    """Oldest first."""
    return [path for path in _directories(directory) if (path / MANIFEST).is_file()]


def _directories(directory: Path) -> list[Path]:
    return sorted(path for path in directory.iterdir() if _NAME.fullmatch(path.name)) if directory.is_dir() else []


def problem_of(path: Path, share: int = 0, shares: int = 1) -> str:
    """What is wrong with (a share of) a checkpoint, "" if nothing is."""
    try:
        read_training_manifest(path)
    except ValueError as error:
        return str(error)
    return check_files(path, share, shares)


def read_training_manifest(path: Path) -> dict[str, Any]:
    """ValueError unless it says what ``Checkpoints.save`` writes; ``recipe`` becomes a Recipe."""
    manifest = read_manifest(path)
    kinds: dict[str, Any] = {"step": int, "ranks": int, "dp": int, "tp": int, "recipe": dict}
    kinds |= {"data": str | None, "end_of_document": int | None, "tokenizer": str | None}
    for key, kind in kinds.items():
        if not isinstance(manifest.get(key), kind):
            raise ValueError(f"{MANIFEST}: {key} is {manifest.get(key)!r:.60}")
    if path.name != f"step-{manifest['step']:08d}":
        raise ValueError(f"{MANIFEST} is that of step {manifest['step']}")
    return manifest | {"recipe": Recipe.from_dict(manifest["recipe"], MANIFEST)}


def _check_same_run(manifest: dict[str, Any], recipe: Recipe, data: str, path: Path) -> None:
    """Layout, speed and logging may change between two halves of a run; what is computed may not."""
    saved, now = manifest["recipe"].to_dict(), recipe.to_dict()
    fixed = {
        "model": None,
        "optimizer": None,
        "data": ("sequence", "seed", "document_attention"),
        "batch": ("rows",),
        "run": ("seed", "precision", "z_loss"),
    }
    remedy = "give the run another checkpoint.directory, or the old value"
    for table, keys in fixed.items():
        for key in keys or saved[table]:
            if saved[table].get(key) != now[table].get(key):
                raise ValueError(
                    f"{path} was trained with {table}.{key} = {saved[table].get(key)!r}, this recipe says {now[table].get(key)!r}: {remedy}"
                )
    wirings = [trained_wiring(each).spec for each in (manifest["recipe"], recipe)]
    if wirings[0] != wirings[1]:  # where ranks hold unlike streams, their number is part of what is computed
        raise ValueError(
            f"{path} was trained as {wirings[0]}, and parallel.tp {recipe.parallel.tp} with parallel.emulate_ranks "
            f"{recipe.parallel.emulate_ranks} would go on as {wirings[1]}: {remedy}"
        )
    if manifest.get("data", data) != data:
        raise ValueError(f"{path} was trained on other data than {recipe.data.train} holds now: {remedy}")


def _reason(error: BaseException, directory: Path) -> str:
    """In the library's archive writer a full disk is a complaint about positions: the free space says more."""
    reason, free = root_cause(error), shutil.disk_usage(directory).free
    return f"{reason} ({free / 2**20:,.0f} MiB are free there)" if free < 1 << 30 else reason


def training_state(trained: ModelWithLoss, optimizer: ShardedAdamW, *, copy: bool) -> dict[str, Tensor]:
    """Weights and moments by name. ``copy``: on the CPU, so that training may go on while they are written."""
    model: Any = trained.model
    specs, shapes, tp = model.shard_specs, model.whole_shapes, optimizer.layout.tp
    parts = {"model": optimizer.shards, **optimizer.state()}
    state: dict[str, Tensor] = {}
    for name, parameter in optimizer.parameters.items():
        chunks = chunks_of(parameter, specs[name], tp)
        for part, tensors in parts.items():
            local = local_of(tensors[name])
            state[f"{part}.{name}"] = ShardOfWhole.of(local.to("cpu", copy=True) if copy else local, chunks, shapes[name])
    return state


def random_state(device: torch.device) -> Tensor:
    """Of every generator of this process, as bytes of fixed size."""
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device).cpu())
    return torch.cat(states)


def set_random_state(state: Tensor, device: torch.device) -> None:
    size = len(torch.get_rng_state())
    torch.set_rng_state(state[:size].clone())
    if device.type == "cuda" and len(state) > size:
        torch.cuda.set_rng_state(state[size:].clone(), device)
