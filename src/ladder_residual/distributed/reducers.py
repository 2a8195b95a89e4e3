"""Reducers that overlap: the all-reduce runs while the caller computes. ``core/reduce.py`` has the contract and the blocking twin."""

from __future__ import annotations

import time
from collections import deque

import torch
import torch.distributed as dist
from torch import Tensor

from ..core.reduce import GroupReducer, ReduceWork
from .sockets import PeerSockets

# Up to this size gathering all partials over sockets and adding them locally (one network trip) beats gloo's all-reduce (two). Two
# ranks send the same number of bytes either way; more ranks send size/2 times as many, so there it is for messages where latency rules.
SMALL_ALLREDUCE_BYTES_TWO_RANKS = 1 << 20
SMALL_ALLREDUCE_BYTES = 1 << 16
# The dtype in which partials travel: their own, or bfloat16 for wider ones. Then each partial is off by at most 2^-8 of itself.
# Partials gathered over sockets are added in their own dtype, so that is the whole error; gloo also adds in bfloat16, 2^-8 of the
# result per rank.
COMM_DTYPES = {"same": None, "bf16": torch.bfloat16}


class _SocketWork(ReduceWork):
    """The partials of all ranks, gathered over sockets. Added in rank order everywhere, so the ranks agree to the last bit."""

    def __init__(self, sockets: PeerSockets, number: int, partials: list[Tensor], dtype: torch.dtype) -> None:
        self.sockets, self.number, self.partials, self.dtype = sockets, number, partials, dtype
        self.result: Tensor | None = None

    def wait(self) -> Tensor:
        if self.result is None:
            self.sockets.receive(self.number)
            self.result = self.partials[0].to(self.dtype) + self.partials[1]
            for partial in self.partials[2:]:
                self.result += partial
            self.partials = []
        return self.result


class _CastWork(ReduceWork):
    """An all-reduce in the communication dtype, returned in the partial's own."""

    def __init__(self, inner: ReduceWork, dtype: torch.dtype) -> None:
        self.inner, self.dtype = inner, dtype

    def wait(self) -> Tensor:
        return self.inner.wait().to(self.dtype)


class _SlowWork(ReduceWork):
    """Emulated latency: the result is there no sooner than ``ready_at`` on this host's clock."""

    def __init__(self, inner: ReduceWork, ready_at: float) -> None:
        self.inner, self.ready_at = inner, ready_at

    def wait(self) -> Tensor:
        result = self.inner.wait()
        left = self.ready_at - time.perf_counter()
        if left > 0:
            time.sleep(left)  # not spun: on a small host the spinning rank would take the core its peer's network thread needs
        return result


class AsyncReducer(GroupReducer):
    """All-reduces over a process group while the caller goes on computing.

    With ``sockets`` (CPU hosts), partials of at most ``small_allreduce_bytes`` are gathered over sockets and added locally: one
    network trip instead of two, and no helper thread. ``comm_dtype`` is one of ``COMM_DTYPES``. A rank rounds its own partial like
    the others', so that all ranks hold the same result. ``second`` is another group of the same ranks: the two take turns, because
    NCCL runs the all-reduces of one group one after the other. ``latency`` emulates a slower link: no result is there sooner than so
    many seconds after its start.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        sockets: PeerSockets | None = None,
        small_allreduce_bytes: int | None = None,
        comm_dtype: str = "same",
        second: dist.ProcessGroup | None = None,
        latency: float = 0.0,
    ) -> None:
        super().__init__(group)
        self._turns = deque([group] if second is None else [group, second])
        if comm_dtype not in COMM_DTYPES:
            raise ValueError(f"unknown comm_dtype {comm_dtype!r}; choose {' or '.join(COMM_DTYPES)}")
        self.comm_dtype = COMM_DTYPES[comm_dtype]
        if small_allreduce_bytes is None:
            small_allreduce_bytes = SMALL_ALLREDUCE_BYTES_TWO_RANKS if self.size == 2 else SMALL_ALLREDUCE_BYTES
        if small_allreduce_bytes < 0:
            raise ValueError(f"small_allreduce_bytes is a number of bytes, 0 or more; got {small_allreduce_bytes}")
        if not 0 <= latency <= 60:
            raise ValueError(f"an emulated latency is between 0 and 60 seconds, got {latency}")
        self.sockets, self.small_allreduce_bytes, self.latency = sockets, small_allreduce_bytes, latency

    def launch(self, partial: Tensor) -> ReduceWork:
        ready_at, dtype = time.perf_counter() + self.latency, partial.dtype
        rounded = self.comm_dtype is not None and dtype.itemsize > self.comm_dtype.itemsize
        message = partial.to(self.comm_dtype) if rounded else partial
        if self.sockets is not None and self._is_small(message):
            work: ReduceWork = _SocketWork(self.sockets, *self.sockets.start_all_gather(message), dtype)
        else:
            work = _CastWork(self.all_reduce(message), dtype) if rounded else self.all_reduce(message)
        return _SlowWork(work, ready_at) if self.latency else work

    def next_group(self) -> dist.ProcessGroup | None:
        self._turns.rotate(-1)
        return self._turns[-1]

    def gather_parts(self, local: Tensor) -> list[Tensor]:
        if self.sockets is None or not self._is_small(local):
            return super().gather_parts(local)
        number, parts = self.sockets.start_all_gather(local)
        self.sockets.receive(number)
        return parts

    def _is_small(self, message: Tensor) -> bool:
        return message.numel() * message.element_size() <= self.small_allreduce_bytes

    def drain(self) -> None:
        if self.sockets is not None:
            self.sockets.drain()
