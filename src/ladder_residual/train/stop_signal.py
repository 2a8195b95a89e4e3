"""SIGTERM as a question between two steps, answered alike on every rank, so that all of them save the same step and end."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..distributed.world import World


class StopSignal:
    """Inside its ``with`` block SIGTERM no longer ends the process. All ranks make it, enter it and call ``requested`` together.

    Ranks may get the signal at different steps, or only some of them: they vote. A vote runs while a step computes and is looked at
    after it, so it costs nothing; the run stops at most two steps after the signal (one process: after the step under way).
    """

    def __init__(self, world: World, timeout: float) -> None:
        self.world = world
        self.received = False
        self.agreed = False
        # Of its own: the thread that writes checkpoints and the model's all-reduces use the others.
        patience = timedelta(seconds=timeout)
        self._group = dist.new_group(backend="gloo", timeout=patience) if world.size > 1 else None
        self._vote: tuple[Tensor, Any] | None = None
        self._previous: Any = None

    def requested(self) -> bool:
        if self._group is None:
            self.agreed = self.received
        elif not self.agreed:
            self._count()
            if not self.agreed:
                ballot = torch.tensor([int(self.received)])
                self._vote = ballot, dist.all_reduce(ballot, group=self._group, async_op=True)
        return self.agreed

    def _count(self) -> None:
        if self._vote is not None:
            (ballot, work), self._vote = self._vote, None
            self.world.drain()
            work.wait()
            self.agreed = bool(ballot.item())

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = True

    def __enter__(self) -> StopSignal:
        if threading.current_thread() is threading.main_thread():  # elsewhere Python takes no signals
            self._previous = signal.signal(signal.SIGTERM, self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._count()  # nothing of ours may be under way when the group is left
        if self._previous is not None:
            signal.signal(signal.SIGTERM, self._previous)


@contextmanager
def ignoring_interrupts() -> Iterator[None]:
    """While the last words of an interrupted run are said: Ctrl-C reaches a rank from the terminal and from its launcher."""
    with suppress(ValueError):  # not in the main thread: nothing to ignore
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        with suppress(ValueError):
            signal.signal(signal.SIGINT, signal.default_int_handler)
