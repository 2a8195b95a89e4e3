"""How a message is summed over ranks inside the engine. A reducer owns its buffers, because some need special memory."""

from __future__ import annotations

import warnings
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from .emulate import Link
from .gemv_ops import Launcher

REAL_REDUCERS = ("nccl", "symm")
ONE_SHOT_BYTES = 256 << 10  # where torch's own choice between the two lies
SYMMETRIC_DTYPES = (torch.bfloat16, torch.float32)


class EngineReducer(Protocol):
    name: str
    silent: bool  # nothing to wait for: a message is its own sum
    multiprocessors: int  # that a sum keeps busy while it runs

    def allocate(self, rows: int, hidden: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
        """(message, sum): where a module writes and where its consumers read; may be one tensor."""
        ...

    def reduce(self, message: Tensor, total: Tensor, lane: int, launch: Launcher) -> None:
        """On the current stream."""
        ...


class NoReducer:
    """One rank, or an emulated rank with a link that costs nothing."""

    name, silent, multiprocessors = "none", True, 0

    def allocate(self, rows: int, hidden: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
        message = torch.full((rows, hidden), float("nan"), dtype=dtype, device=device)
        return message, message

    def reduce(self, message: Tensor, total: Tensor, lane: int, launch: Launcher) -> None:
        raise AssertionError("nothing to reduce")


class EmulatedReducer(NoReducer):
    """A copy that lasts as long as the link says; the other ranks' partials are missing, so the sum is this rank's own."""

    name, silent, multiprocessors = "emulated", False, 8

    def __init__(self, link: Link) -> None:
        self.link = link

    def allocate(self, rows: int, hidden: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
        return tuple(torch.full((rows, hidden), float("nan"), dtype=dtype, device=device) for _ in range(2))  # type: ignore[return-value]

    def reduce(self, message: Tensor, total: Tensor, lane: int, launch: Launcher) -> None:
        from .kernels_small import copy_that_lasts

        size = message.numel() * message.element_size()
        nanoseconds = round(1000 * self.link.microseconds(size))
        launch(copy_that_lasts, (self.multiprocessors,), message, total, message.numel(), nanoseconds, BLOCK=2048, warps=8)


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
    them where they lie and hands it to the others (two-shot), which moves fewer bytes and waits once more."""

    name, silent, multiprocessors = "symm", False, 8

    def __init__(self, group: Any) -> None:
        import torch.distributed._symmetric_memory as symm_mem

        self._symm, self.group = symm_mem, group

    def allocate(self, rows: int, hidden: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
        message = self._symm.empty(rows, hidden, dtype=dtype, device=device)
        self._symm.rendezvous(message, self.group.group_name)
        message.fill_(float("nan"))
        if message.nbytes > ONE_SHOT_BYTES:
            return message, message
        return message, torch.full((rows, hidden), float("nan"), dtype=dtype, device=device)

    def reduce(self, message: Tensor, total: Tensor, lane: int, launch: Launcher) -> None:
        if total is message:
            torch.ops.symm_mem.two_shot_all_reduce_(message, "sum", self.group.group_name)
        else:
            torch.ops.symm_mem.one_shot_all_reduce_out(message, "sum", self.group.group_name, total)
        launch.dependent = False


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
        return NoReducer() if link.silent else EmulatedReducer(link)
    if kind not in REAL_REDUCERS:
        raise ValueError(f"unknown reducer {kind!r}; choose from none, emulated, {', '.join(REAL_REDUCERS)}")
    if groups is None:
        raise ValueError(f"reducer {kind!r} needs groups: one process group for each of the two lanes")
    if kind == "symm":
        try:
            if dtype not in SYMMETRIC_DTYPES:
                raise RuntimeError(f"it sums bfloat16 and float32, not {dtype}")
            reducer = SymmetricReducer(groups[0])
            for rows in (1, 1 + ONE_SHOT_BYTES // (1024 * dtype.itemsize)):  # one-shot, two-shot
                message, total = reducer.allocate(rows, 1024, dtype, device)
                reducer.reduce(message, total, 0, Launcher(pdl=0))
            return reducer
        except (RuntimeError, ImportError, AttributeError) as error:
            warnings.warn(f"no symmetric memory here ({str(error).splitlines()[0]:.120}); using NCCL", stacklevel=2)
    return NcclReducer(groups)
