"""How a partial is all-reduced inside the engine. A reducer allocates its buffers, because some need special memory."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ..links import Link
from . import REAL_REDUCERS
from .cuda.device import is_hopper
from .cuda.launcher import Launcher
from .cuda.pdl import PdlMode

ONE_SHOT_BYTES = 256 << 10  # torch switches between the two there too
BLOCK = 2048  # elements that one program of an emulated all-reduce copies at a time
LARGE = 64 * BLOCK  # elements; of larger messages 16 times as many, or copying them would outlast the link
SYMMETRIC_DTYPES = (torch.bfloat16, torch.float32)


class EngineReducer(Protocol):
    name: str
    is_noop: bool  # a partial is its own sum: nothing to start or to wait for
    sm_count: int  # SMs that an all-reduce keeps busy
    pdl: bool  # all-reduces may be launched before their input is complete, and what waits for one before its end

    def allocate(self, rows: int, hidden: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
        """(partial, reduced): where a module writes and where its consumers read; may be one tensor."""
        ...

    def reduce(self, partial: Tensor, reduced: Tensor, channel: int, launch: Launcher) -> None:
        """On the current stream. All-reduces of different channels (0 and 1) may run at the same time."""
        ...


class NoReducer:
    """One rank, or an emulated rank with a link that takes no time."""

    name, is_noop, sm_count, pdl = "none", True, 0, False

    def allocate(self, rows: int, hidden: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
        partial = torch.full((rows, hidden), float("nan"), dtype=dtype, device=device)
        return partial, partial

    def reduce(self, partial: Tensor, reduced: Tensor, channel: int, launch: Launcher) -> None:
        raise AssertionError("nothing to reduce")


class EmulatedReducer(NoReducer):
    """A copy that takes as long as the link says. The other ranks' partials are missing, so the result is this rank's own."""

    name, is_noop, sm_count = "emulated", False, 8

    def __init__(self, link: Link, tp: int, device: torch.device) -> None:
        self.link, self.tp, self.pdl = link, tp, link.pdl and is_hopper(device)

    def allocate(self, rows: int, hidden: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
        return tuple(torch.full((rows, hidden), float("nan"), dtype=dtype, device=device) for _ in range(2))  # type: ignore[return-value]

    def reduce(self, partial: Tensor, reduced: Tensor, channel: int, launch: Launcher) -> None:
        from .kernels.elementwise import timed_copy

        size = partial.numel() * partial.element_size()
        nanoseconds = round(1000 * self.link.us(size, self.tp))
        block = BLOCK if partial.numel() <= LARGE else 16 * BLOCK
        programs = min(self.sm_count, -(-partial.numel() // block))  # none without a block to copy
        start = launch if self.pdl else Launcher(PdlMode.OFF, smem_carveout=launch.smem_carveout)
        start(timed_copy, (programs,), partial, reduced, partial.numel(), nanoseconds, BLOCK=block, num_warps=8)
        launch.dependent = self.pdl


class NcclReducer(NoReducer):
    """NCCL on the stream it is called on. ``groups``: a communicator per channel, because collectives of one communicator run one after
    the other."""

    name, is_noop, sm_count = "nccl", False, 16

    def __init__(self, groups: tuple[Any, Any]) -> None:
        self.groups = groups

    def reduce(self, partial: Tensor, reduced: Tensor, channel: int, launch: Launcher) -> None:
        dist.all_reduce(partial, group=self.groups[channel])
        launch.dependent = False


class SymmetricReducer(NoReducer):
    """torch symmetric memory. One-shot for small messages: every rank reads its peers'. Two-shot for large ones: each rank reduces its
    part in place and hands it to the others, which moves fewer bytes."""

    name, is_noop, sm_count = "symm", False, 24

    def __init__(self, group: Any) -> None:
        import torch.distributed._symmetric_memory as symm_mem

        self._symm, self.group = symm_mem, group

    def allocate(self, rows: int, hidden: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
        partial = self.empty(rows, hidden, dtype, device)
        self.rendezvous(partial)
        partial.fill_(float("nan"))
        if partial.nbytes > ONE_SHOT_BYTES:
            return partial, partial
        return partial, torch.full((rows, hidden), float("nan"), dtype=dtype, device=device)

    def empty(self, rows: int, hidden: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return self._symm.empty(rows, hidden, dtype=dtype, device=device)

    def rendezvous(self, partial: Tensor) -> None:
        """With all ranks: each learns the addresses of the others' buffers."""
        self._symm.rendezvous(partial, self.group.group_name)

    def reduce(self, partial: Tensor, reduced: Tensor, channel: int, launch: Launcher) -> None:
        if reduced is partial:
            torch.ops.symm_mem.two_shot_all_reduce_(partial, "sum", self.group.group_name)
        else:
            torch.ops.symm_mem.one_shot_all_reduce_out(partial, "sum", self.group.group_name, reduced)
        launch.dependent = False


def _symmetric_reducer(group: Any, dtype: torch.dtype, device: torch.device) -> SymmetricReducer:
    """RuntimeError on every rank if one of them has no symmetric memory: the others must not wait for it in the next stage."""
    reducer: Any = None
    buffers: list[Tensor] = []

    def allocate() -> None:
        nonlocal reducer
        if dtype not in SYMMETRIC_DTYPES:
            raise RuntimeError(f"it reduces bfloat16 and float32, not {dtype}")
        reducer = SymmetricReducer(group)
        one_shot, two_shot = 1, 1 + ONE_SHOT_BYTES // (1024 * dtype.itemsize)
        buffers.extend(reducer.empty(rows, 1024, dtype, device) for rows in (one_shot, two_shot))

    def rendezvous() -> None:
        for buffer in buffers:
            reducer.rendezvous(buffer)

    def reduce() -> None:
        small, large = (buffer.zero_() for buffer in buffers)
        reducer.reduce(small, torch.empty_like(small), 0, Launcher(PdlMode.OFF))
        reducer.reduce(large, large, 0, Launcher(PdlMode.OFF))
        torch.cuda.synchronize(device)

    for stage in (allocate, rendezvous, reduce):
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
        return NoReducer() if link.silent else EmulatedReducer(link, tp, device)
    if kind not in REAL_REDUCERS:
        raise ValueError(f"unknown reducer {kind!r}; choose from none, emulated, {', '.join(REAL_REDUCERS)}")
    if groups is None:
        raise ValueError(f"reducer {kind!r} needs groups: two process groups of all ranks")
    if kind == "symm":
        try:
            with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
                return _symmetric_reducer(groups[0], dtype, device)
        except RuntimeError as error:
            warnings.warn(f"no symmetric memory here ({error!s:.120}); using NCCL", stacklevel=2)
    return NcclReducer(groups)
