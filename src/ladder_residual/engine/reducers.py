"""How a partial is all-reduced inside the engine. A reducer allocates its buffers, because some need special memory."""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ..links import Link
from .cuda.device import is_hopper
from .cuda.launcher import Launcher
from .cuda.pdl import PdlMode

ONE_SHOT_BYTES = 256 << 10  # torch switches between the two there too
BLOCK = 2048  # elements that one program of an emulated all-reduce copies at a time
LARGE = 64 * BLOCK  # elements; of larger messages 16 times as many, or copying them would outlast the link


class EngineReducer(Protocol):
    name: str
    is_noop: bool  # a partial is its own sum: nothing to start or to wait for
    sm_count: int  # SMs that an all-reduce keeps busy
    pdl: bool  # all-reduces may be launched before their input is complete, and what waits for one before its end

    def allocate(
        self, rows: int, hidden: int, dtype: torch.dtype, device: torch.device, *, keep_partial: bool = False
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """(partial, reduced): where a module writes and where its consumers read; may be one tensor unless ``keep_partial``."""
        ...

    def reduce(self, partial: Tensor, reduced: Tensor, channel: int, launch: Launcher) -> None:
        """On the current stream. All-reduces of different channels (0 and 1) may run at the same time."""
        ...


class NoReducer:
    """One rank, or an emulated rank with a link that takes no time."""

    name, is_noop, sm_count, pdl = "none", True, 0, False

    def allocate(
        self, rows: int, hidden: int, dtype: torch.dtype, device: torch.device, *, keep_partial: bool = False
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        partial = _unwritten(rows, hidden, dtype, device)
        return partial, _unwritten(rows, hidden, dtype, device) if keep_partial else partial

    def reduce(self, partial: Tensor, reduced: Tensor, channel: int, launch: Launcher) -> None:
        raise AssertionError("nothing to reduce")


class EmulatedReducer(NoReducer):
    """A copy that takes as long as the link says. The other ranks' partials are missing, so the result is this rank's own."""

    name, is_noop, sm_count = "emulated", False, 8

    def __init__(self, link: Link, tp: int, device: torch.device) -> None:
        self.link, self.tp, self.pdl = link, tp, link.pdl and is_hopper(device)

    def allocate(
        self, rows: int, hidden: int, dtype: torch.dtype, device: torch.device, *, keep_partial: bool = False
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        return _unwritten(rows, hidden, dtype, device), _unwritten(rows, hidden, dtype, device)

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
        if reduced is not partial:
            reduced.copy_(partial)
        dist.all_reduce(reduced, group=self.groups[channel])
        launch.dependent = False


class SymmetricReducer(NoReducer):
    """torch symmetric memory. One-shot for small messages: every rank reads its peers'. Two-shot for large ones: each rank reduces its
    part in place and hands it to the others, which moves fewer bytes."""

    name, is_noop, sm_count = "symm", False, 24

    def __init__(self, group: Any) -> None:
        import torch.distributed._symmetric_memory as symm_mem

        self._symm, self.group = symm_mem, group

    def allocate(
        self, rows: int, hidden: int, dtype: torch.dtype, device: torch.device, *, keep_partial: bool = False
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        shared = self.shared_buffer(rows, hidden, dtype, device)
        if shared.nbytes <= ONE_SHOT_BYTES:
            return shared, _unwritten(rows, hidden, dtype, device)
        return (_unwritten(rows, hidden, dtype, device) if keep_partial else shared), shared

    def shared_buffer(self, rows: int, hidden: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """With all ranks: each learns the addresses of the others' buffers."""
        made = self.empty(rows, hidden, dtype, device)
        self.rendezvous(made)
        return made.fill_(float("nan"))

    def empty(self, rows: int, hidden: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return self._symm.empty(rows, hidden, dtype=dtype, device=device)

    def rendezvous(self, buffer: Tensor) -> None:
        self._symm.rendezvous(buffer, self.group.group_name)

    def reduce(self, partial: Tensor, reduced: Tensor, channel: int, launch: Launcher) -> None:
        if reduced.nbytes <= ONE_SHOT_BYTES:
            torch.ops.symm_mem.one_shot_all_reduce_out(partial, "sum", self.group.group_name, reduced)
        else:
            if reduced is not partial:
                reduced.copy_(partial)
            torch.ops.symm_mem.two_shot_all_reduce_(reduced, "sum", self.group.group_name)
        launch.dependent = False


class SymmetricPromptReducer(SymmetricReducer):
    """For prompts of any length: buffers are kept and used again, because all ranks must set them up together."""

    def __init__(self, group: Any) -> None:
        super().__init__(group)
        self._kept: list[Tensor] = []
        self._taken = 0

    def next_prompt(self) -> None:
        """The buffers of the prompt before are free."""
        self._taken = 0

    def shared_buffer(self, rows: int, hidden: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        index, self._taken = self._taken, self._taken + 1
        if index == len(self._kept):
            self._kept.append(super().shared_buffer(rows, hidden, dtype, device))
        elif self._kept[index].shape[0] < rows:
            self._kept[index] = self._kept[index][:0].clone()  # freed before there is a larger one
            self._kept[index] = super().shared_buffer(rows, hidden, dtype, device)
        return self._kept[index][:rows]

    @property
    def kept_bytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._kept)


def _unwritten(rows: int, hidden: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """NaN, so that what is read before it is written shows."""
    return torch.full((rows, hidden), float("nan"), dtype=dtype, device=device)
