"""Checkpoints that are there whole or not at all.

Each rank copies its shards to the CPU and goes on training; a thread writes them through ``torch.distributed.checkpoint`` into
``step-00000100.tmp``, then the sizes and checksums of all files into ``complete.json``, and renames the directory. What a crash leaves
behind has no such name. When a run is resumed the newest checkpoint whose files match their checksums is taken, on any layout; damaged
ones are set aside, so that their steps are saved again.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
import shutil
import warnings
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from ..parallel import tells_of_lost_peer
from ..sockets import PeerLost
from .building import NextToken, trained_wiring
from .layout import Layout
from .optimizer import ShardedAdamW
from .reading import CheckpointReader
from .recipe import Recipe
from .whole import random_state, set_random_state, training_state

MANIFEST = "complete.json"
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
        self.group = dist.new_group(backend="gloo", timeout=patience) if world.size > 1 else None
        self.thread = ThreadPoolExecutor(1)
        expect_one_process()
        self.writing: Future[None] | None = None
        if world.is_main:
            directory.mkdir(parents=True, exist_ok=True)
            for leftover in directory.glob("*.tmp"):
                shutil.rmtree(leftover, ignore_errors=True)
        world.barrier()

    def found(self) -> list[Path]:
        return complete_checkpoints(self.directory)

    def newest(self) -> Path | None:
        found = self.found()
        return found[-1] if found else None

    def save(
        self, step: int, trained: NextToken, optimizer: ShardedAdamW, recipe: Recipe, about: dict[str, Any], *, wait: bool
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
        rank, alone = self.layout.world.rank, self.group is None
        try:
            if rank == 0:
                temporary.mkdir(parents=True)
            self._barrier()
            writer = dcp.FileSystemWriter(temporary, single_file_per_rank=True, sync_files=True)
            dcp.save(state, storage_writer=writer, process_group=self.group, no_dist=alone)
            mine = {path.name: _fingerprint(path) for path in temporary.glob(f"__{rank}_*")}
            everyones: list[Any] = [None] * self.layout.world.size
            if alone:
                everyones = [mine]
            else:
                dist.all_gather_object(everyones, mine, group=self.group)
            if rank == 0:
                files = {name: print_ for part in everyones for name, print_ in part.items()}
                files[".metadata"] = _fingerprint(temporary / ".metadata")
                _write_durably(temporary / MANIFEST, json.dumps(manifest | {"files": files}))
                if final.exists():
                    shutil.rmtree(final)  # without its list of files: the rest of a deletion that was cut off
                os.replace(temporary, final)
                _sync_directory(self.directory)
                self._retire()
        except (Exception, CheckpointException) as error:  # the latter is no Exception
            if rank == 0:
                shutil.rmtree(temporary, ignore_errors=True)  # gives the space back as well
            newest = self.newest()
            rest = f"the newest good checkpoint is {newest}" if newest else "there is no earlier checkpoint"
            reason = _reason(error, self.directory)
            if tells_of_lost_peer(reason):
                raise PeerLost(f"rank {rank} lost its peers while it saved step {step}: {reason}; {rest}") from error
            raise SaveFailed(f"could not save step {step} to {final}: {reason}; {rest}") from error

    def _retire(self) -> None:
        for old in self.found()[: -self.keep]:
            (old / MANIFEST).unlink()  # first of all, so that a half-deleted one is not taken for a checkpoint
            shutil.rmtree(old, ignore_errors=True)

    def load(self, trained: NextToken, optimizer: ShardedAdamW, recipe: Recipe, data: str, say: Callable[[str], None]) -> int:
        """Restore the newest good checkpoint into the model and the optimizer; the step to go on from, 0 if there is none.
        ``data``: the fingerprint of what is trained on."""
        world = self.layout.world
        for path in reversed(world.broadcast([str(path) for path in self.found()])):
            if problem := self._problem(Path(path)):
                say(f"{path} is damaged ({problem}): set aside, trying the one before")
                self._set_aside(Path(path))
                continue
            text = (Path(path) / MANIFEST).read_text(encoding="utf-8")
            world.check_same(f"the checkpoint {path}", text)
            manifest = json.loads(text)
            _check_same_run(manifest, recipe, data, path)
            state = training_state(trained, optimizer, copy=False)
            key = f"random.{world.rank}"
            if manifest["ranks"] == world.size:
                state[key] = random_state(self.layout.device)
            dcp.load(state, storage_reader=CheckpointReader(path), process_group=self.group, no_dist=self.group is None)
            if key in state:
                set_random_state(state[key], self.layout.device)
            optimizer.set_steps(manifest["step"])
            layout = f"dp {manifest['dp']} x tp {manifest['tp']}"
            say(f"resumed from {path} (step {manifest['step']}, written by {layout})")
            return manifest["step"]
        return 0

    def _set_aside(self, path: Path) -> None:
        """Nothing is deleted: someone may want to know what happened to it."""
        if self.layout.world.is_main:
            names = (path.with_name(f"{path.name}.damaged{number or ''}") for number in itertools.count())
            path.rename(next(name for name in names if not name.exists()))
        self.layout.world.barrier()

    def _problem(self, path: Path) -> str:
        """What is wrong with a checkpoint; each rank looks at its share of the files."""
        world = self.layout.world
        mine = check_files(path, world.rank, world.size)
        if world.size == 1:
            return mine
        found: list[Any] = [None] * world.size
        world.settle()
        dist.all_gather_object(found, mine, group=self.group)
        return next((text for text in found if text), "")

    def _barrier(self) -> None:
        if self.group is not None:
            dist.barrier(self.group)


def expect_one_process() -> None:
    """The library warns whenever it is used without ranks, which is meant here."""
    warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


def complete_checkpoints(directory: Path) -> list[Path]:
    """Oldest first."""
    if not directory.is_dir():
        return []
    return sorted(path for path in directory.iterdir() if _NAME.fullmatch(path.name) and (path / MANIFEST).is_file())


def check_files(path: Path, share: int = 0, shares: int = 1) -> str:
    """What is wrong with (a share of) the files of a checkpoint, "" if nothing is."""
    try:
        files = json.loads((path / MANIFEST).read_text(encoding="utf-8"))["files"]
    except (OSError, ValueError, KeyError) as error:
        return f"{MANIFEST} cannot be read: {error}"
    for name in sorted(files)[share::shares]:
        size, sha256 = files[name]
        file = path / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != size:
            return f"{name} has {file.stat().st_size} bytes instead of {size}"
        if _fingerprint(file)[1] != sha256:
            return f"the checksum of {name} is wrong"
    return ""


def _check_same_run(manifest: dict[str, Any], recipe: Recipe, data: str, path: str) -> None:
    """Layout, speed and logging may change between two halves of a run; what is computed may not."""
    saved, now = manifest["recipe"], json.loads(json.dumps(recipe.to_dict()))
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
    wirings = [trained_wiring(each).spec for each in (Recipe.from_dict(saved, path), recipe)]
    if wirings[0] != wirings[1]:  # where ranks hold unlike streams, their number is part of what is computed
        raise ValueError(
            f"{path} was trained as {wirings[0]}, and parallel.tp {recipe.parallel.tp} with parallel.emulate_ranks "
            f"{recipe.parallel.emulate_ranks} would go on as {wirings[1]}: {remedy}"
        )
    if manifest.get("data", data) != data:
        raise ValueError(f"{path} was trained on other data than {recipe.data.train} holds now: {remedy}")


def _fingerprint(path: Path) -> list[Any]:
    with path.open("rb") as file:
        return [path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest()]


def _write_durably(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _reason(error: BaseException, directory: Path) -> str:
    """The cause at the bottom of what the checkpoint library wraps around it. Its archive writer answers a failed write with a
    complaint about positions; the operating system's own words are one level further down, if they are there at all."""
    failures = getattr(error, "failures", None)
    if failures:
        inner = next(iter(failures.values()))
        error = inner[0] if isinstance(inner, tuple) else inner
    at: BaseException | None = error
    while at is not None and not isinstance(at, OSError):
        at = at.__cause__ or at.__context__
    words = str(at or error).strip().splitlines()
    reason = words[-1] if words else type(error).__name__
    free = shutil.disk_usage(directory).free
    return f"{reason} ({free / 2**20:,.0f} MiB are free there)" if at is None or free < 1 << 30 else reason
