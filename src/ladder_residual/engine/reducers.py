"""How a message is summed over ranks inside the engine. A reducer owns its buffers, because some need special memory."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from .emulate import Link
from .launcher import Launcher
from .multiprocessors import hopper

REAL_REDUCERS = ("nccl", "symm")
ONE_SHOT_BYTES = 256 << 10  # where torch's own choice between the two lies
COPIED = 2048  # elements of a message that one program of an emulated sum copies at a time
LARGE = 64 * COPIED  # elements; of larger messages 16 times as many, or copying them would outlast the link
SYMMETRIC_DTYPES = (torch.bfloat16, torch.float32)


class EngineReducer(Protocol):
    name: str
    silent: bool  # nothing to wait for: a message is its own sum
    multiprocessors: int  # that a sum keeps busy while it runs
    early: bool  # sums may be launched before their message is there, and what waits for one before its end

    def allocate(self, rows: int, hidden: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
        """(message, sum): where a module writes and where its consumers read; may be one tensor."""
        ...

    def reduce(self, message: Tensor, total: Tensor, lane: int, launch: Launcher) -> None:
        """On the current stream."""
        ...


class NoReducer:
    """One rank, or an emulated rank with a link that costs nothing."""

    name, silent, multiprocessors, early = "none", True, 0, False

    def allocate(self, rows: int, hidden: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
        message = torch.full((rows, hidden), float("nan"), dtype=dtype, device=device)
        return message, message

    def reduce(self, message: Tensor, total: Tensor, lane: int, launch: Launcher) -> None:
        raise AssertionError("nothing to reduce")


class EmulatedReducer(NoReducer):
    """A copy that lasts as long as the link says; the other ranks' partials are missing, so the sum is this rank's own."""

    name, silent, multiprocessors = "emulated", False, 8

    def __init__(self, link: Link, device: torch.device) -> None:
        self.link, self.early = link, link.early and hopper(device)

    def allocate(self, rows: int, hidden: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
        return tuple(torch.full((rows, hidden), float("nan"), dtype=dtype, device=device) for _ in range(2))  # type: ignore[return-value]

    def reduce(self, message: Tensor, total: Tensor, lane: int, launch: Launcher) -> None:
        from .kernels_small import copy_that_lasts

        size = message.numel() * message.element_size()
        nanoseconds = round(1000 * self.link.microseconds(size))
        piece = COPIED if message.numel() <= LARGE else 16 * COPIED
        programs = min(self.multiprocessors, -(-message.numel() // piece))  # none without a piece of the message
        start = launch if self.early else Launcher(pdl=0, carveout=launch.carveout)
        start(copy_that_lasts, (programs,), message, total, message.numel(), nanoseconds, BLOCK=piece, warps=8)
        launch.dependent = self.early


class NcclReducer(NoReducer):
    """NCCL on the stream it is called on. ``groups``: one communicator per lane, because collectives of one communicator run
    one after the other and the two lanes must not wait for each other."""

    name, silent, multiprocessors = "nccl", False, 16

    def __init__(self, groups: tuple[Any, Any]) -> None:
        self.groups = groups

    def reduce(self, message: Tensor, total: Tensor, lane: int, launch: Launcher) -> None:
        dist.all_reduce(message, group=self.groups[lane])
        launch.dependent = False


class SymmetricReducer(NoReducer):
    """torch symmetric memory. Small messages: every rank reads all of its peers' (one-shot). Large ones: each rank sums its part of
    them where they lie and hands it to the others (two-shot), which moves fewer bytes."""

    name, silent, multiprocessors = "symm", False, 24

    def __init__(self, group: Any) -> None:
        import torch.distributed._symmetric_memory as symm_mem

        self._symm, self.group = symm_mem, group

    def allocate(self, rows: int, hidden: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
        message = self.hold(rows, hidden, dtype, device)
        self.meet(message)
        message.fill_(float("nan"))
        if message.nbytes > ONE_SHOT_BYTES:
            return message, message
        return message, torch.full((rows, hidden), float("nan"), dtype=dtype, device=device)

    def hold(self, rows: int, hidden: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return self._symm.empty(rows, hidden, dtype=dtype, device=device)

    def meet(self, message: Tensor) -> None:
        """With all ranks: each learns where the others' message lies."""
        self._symm.rendezvous(message, self.group.group_name)

    def reduce(self, message: Tensor, total: Tensor, lane: int, launch: Launcher) -> None:
        if total is message:
            torch.ops.symm_mem.two_shot_all_reduce_(message, "sum", self.group.group_name)
        else:
            torch.ops.symm_mem.one_shot_all_reduce_out(message, "sum", self.group.group_name, total)
        launch.dependent = False


def _symmetric_reducer(group: Any, dtype: torch.dtype, device: torch.device) -> SymmetricReducer:
    """RuntimeError, on every rank, if one of them has no symmetric memory: the others must not wait for it in the next step."""
    reducer: Any = None
    messages: list[Tensor] = []

    def begin() -> None:
        nonlocal reducer
        if dtype not in SYMMETRIC_DTYPES:
            raise RuntimeError(f"it sums bfloat16 and float32, not {dtype}")
        reducer = SymmetricReducer(group)
        one_shot, two_shot = 1, 1 + ONE_SHOT_BYTES // (1024 * dtype.itemsize)
        messages.extend(reducer.hold(rows, 1024, dtype, device) for rows in (one_shot, two_shot))

    def meet() -> None:
        for message in messages:
            reducer.meet(message)

    def add() -> None:
        small, large = (message.zero_() for message in messages)
        reducer.reduce(small, torch.empty_like(small), 0, Launcher(pdl=0))
        reducer.reduce(large, large, 0, Launcher(pdl=0))
        torch.cuda.synchronize(device)

    for stage in (begin, meet, add):
        problem = ""
        try:
            stage()
        except (RuntimeError, ImportError, AttributeError) as error:
            problem = str(error).splitlines()[0] if str(error) else type(error).__name__
        works = torch.tensor([0 if problem else 1], device=device)
        dist.all_reduce(works, op=dist.ReduceOp.MIN, group=group)
        if not int(works):
            raise RuntimeError(problem or "another rank has none")
    return reducer


def make_reducer(
    kind: str, *, tp: int, link: Link | None, groups: tuple[Any, Any] | None, dtype: torch.dtype, device: torch.device
) -> EngineReducer:
    """``symm`` falls back to ``nccl`` with one warning where the hardware or the dtype lacks it."""
    if kind == "none":
        if tp > 1:
            raise ValueError(f"reducer 'none' on tp={tp} would drop the other ranks: use 'nccl', 'symm' or 'emulated'")
        return NoReducer()
    if kind == "emulated":
        if link is None:
            raise ValueError("reducer 'emulated' needs a link, such as parse_link('24us')")
        return NoReducer() if link.silent else EmulatedReducer(link, device)
    if kind not in REAL_REDUCERS:
        raise ValueError(f"unknown reducer {kind!r}; choose from none, emulated, {', '.join(REAL_REDUCERS)}")
    if groups is None:
        raise ValueError(f"reducer {kind!r} needs groups: one process group for each of the two lanes")
    if kind == "symm":
        try:
            with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
                return _symmetric_reducer(groups[0], dtype, device)
        except RuntimeError as error:
            warnings.warn(f"no symmetric memory here ({error!s:.120}); using NCCL", stacklevel=2)
    return NcclReducer(groups)
