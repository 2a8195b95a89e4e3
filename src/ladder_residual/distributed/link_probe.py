"""The link between CPU ranks, measured at start, and the way of all-reducing that follows from it.

Small partials are best gathered over sockets and added locally (one network trip), large ones best all-reduced by gloo (two trips,
but fewer bytes where there are many ranks, and threads that move them). Where the one becomes faster than the other depends on
latency, rate and processors. All ranks decide by the same times (the slowest rank's), so all decide alike.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ..core.reduce import Reducer
from .world import World

# Up to what a socket's buffers take (tcp_wmem's usual ceiling): beyond that a message would not move while the rank computes.
SIZES = (1 << 10, 1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 22)
REPEATS = 5
REDUCES_PER_REPEAT = 4  # ranks leave a barrier up to a trip apart, which shall not count once per all-reduce
BUDGET_SECONDS = 2.0  # on a slow link the larger sizes are left out
SMALL_ALLREDUCE = ("fixed", "measured")


@dataclass(frozen=True)
class AllReduceTimes:
    """Median seconds of one all-reduce of float32 partials of ``bytes``, each way."""

    bytes: int
    sockets: float
    sockets_bf16: float
    gloo: float


@dataclass(frozen=True)
class LinkProbe:
    rows: tuple[AllReduceTimes, ...]
    small_allreduce_bytes: int
    latency: float  # seconds of the smallest all-reduce over sockets
    bytes_per_second: float  # of the largest all-reduce over sockets, each way

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def probe_link(
    world: World, sizes: tuple[int, ...] = SIZES, repeats: int = REPEATS, budget: float = BUDGET_SECONDS
) -> LinkProbe:
    """Measure; all ranks together, and with the same result on each."""
    if world.size < 2 or world.sockets is None:
        raise ValueError("a link is probed between two or more CPU ranks")
    reducers = {
        "sockets": world.reducer(small_allreduce_bytes=max(sizes)),
        "sockets_bf16": world.reducer(small_allreduce_bytes=max(sizes), comm_dtype="bf16"),
        "gloo": world.reducer(small_allreduce_bytes=0),
    }
    rows: list[AllReduceTimes] = []
    spent = 0.0
    for size in sizes:
        message = torch.ones(size // 4)
        times = {name: _seconds(reducer, message, repeats, world) for name, reducer in reducers.items()}
        medians = {name: statistics.median(seconds) for name, seconds in times.items()}
        rows.append(AllReduceTimes(size, **medians))
        spent += REDUCES_PER_REPEAT * sum(sum(seconds) for seconds in times.values())
        if spent > budget:
            break
    return LinkProbe(tuple(rows), crossover_bytes(rows), rows[0].sockets, rows[-1].bytes / rows[-1].sockets)


def crossover_bytes(rows: list[AllReduceTimes]) -> int:
    """The largest size up to which sockets were never slower than gloo."""
    limit = 0
    for row in rows:
        if row.sockets > row.gloo:
            break
        limit = row.bytes
    return limit


def reducer_for_link(world: World, *, small_allreduce: str = "fixed", comm_dtype: str = "same") -> Reducer:
    """The asynchronous reducer; with ``small_allreduce="measured"`` a probe of the link decides which all-reduces are small."""
    if small_allreduce not in SMALL_ALLREDUCE:
        raise ValueError(f"unknown small_allreduce {small_allreduce!r}; choose {' or '.join(SMALL_ALLREDUCE)}")
    if small_allreduce == "fixed" or world.size == 1:
        return world.reducer(comm_dtype=comm_dtype)
    if world.sockets is None:
        raise ValueError("--small-allreduce measured chooses between ways of CPU ranks; drop it on other devices")
    return world.reducer(small_allreduce_bytes=probe_link(world).small_allreduce_bytes, comm_dtype=comm_dtype)


def _seconds(reducer: Reducer, message: torch.Tensor, repeats: int, world: World) -> list[float]:
    """Per all-reduce; of each repeat the slowest rank's time, the same list on every rank. The first repeat warms up."""
    times = []
    for _ in range(repeats + 1):
        world.barrier()
        start = time.perf_counter()
        for _ in range(REDUCES_PER_REPEAT):
            reducer.start(message).wait()
        times.append((time.perf_counter() - start) / REDUCES_PER_REPEAT)
    return world.slowest(times[1:])
