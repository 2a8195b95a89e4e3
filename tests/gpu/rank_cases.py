"""What real ranks on a GPU compare, who prepares which of it, and when all of them stop."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist

from ladder_residual.core.config import Wiring
from ladder_residual.engine.schedule import available_schedules

WIRINGS = (
    "standard", "ladder", "ladder:2-3", "parallel", "desync-2x", "desync-3x", "delayed-1", "delayed-2", "delayed-1:1-2", "no-comm",
)  # fmt: skip
BATCHES = (1, 3, 16)
REDUCERS = ("symm", "nccl")

Item = TypeVar("Item")


class Case(NamedTuple):
    wiring: str
    batch: int
    reducer: str
    schedule: str


def all_cases(num_layers: int) -> list[Case]:
    """Those of one batch and wiring, which have one reference, one after the other."""
    return [
        Case(wiring, batch, reducer, schedule)
        for batch, wiring, reducer in itertools.product(BATCHES, WIRINGS, REDUCERS)
        for schedule in available_schedules(Wiring.parse(wiring, num_layers))
    ]


def share(items: Sequence[Item], rank: int, size: int) -> list[Item]:
    """What this rank prepares for all."""
    return list(items[rank::size])


class Deadline:
    """``seconds`` from now on, by the slowest rank's clock; None: never."""

    def __init__(self, seconds: float | None, group: dist.ProcessGroup, device: torch.device) -> None:
        self._ends = None if seconds is None else time.monotonic() + seconds
        self._group, self._device = group, device

    def passed(self) -> bool:
        """The same on all ranks, which must ask together: one that went on alone would wait for the others for ever."""
        if self._ends is None:
            return False
        late = torch.tensor([time.monotonic() > self._ends], dtype=torch.int32, device=self._device)
        dist.all_reduce(late, op=dist.ReduceOp.MAX, group=self._group)
        return bool(late)
