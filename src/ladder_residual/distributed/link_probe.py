"""What the link between CPU ranks is worth for each way of summing, measured at start, and the choice that follows from it.

A small message is best exchanged whole and added locally (one trip); a large one is best all-reduced (two trips, but fewer bytes
where there are many ranks, and gloo's threads move it). Where one becomes the other depends on latency, rate and processors. All
ranks decide by the same times (the slowest rank's), so all decide alike.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist

from .parallel import World
from .reduce import Reducer

# Up to what a socket's buffers take (tcp_wmem's usual ceiling): beyond that an exchange would not move while the rank computes.
SIZES = (1 << 10, 1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 22)
REPEATS = 5
IN_A_ROW = 4  # sums per repeat: ranks leave a barrier up to a trip apart, which shall not count once per sum
BUDGET_SECONDS = 2.0  # on a slow link the larger sizes are left out
EXCHANGES = ("fixed", "measured")


@dataclass(frozen=True)
class SumTimes:
    """Median seconds of one sum of float32 partials of ``bytes``, each way."""

    bytes: int
    exchange: float
    exchange_bf16: float
    all_reduce: float


@dataclass(frozen=True)
class LinkProbe:
    rows: tuple[SumTimes, ...]
    exchange_below: int  # bytes
    latency: float  # seconds of the smallest exchange
    bytes_per_second: float  # of the largest exchange, each way

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def probe_link(
    world: World, sizes: tuple[int, ...] = SIZES, repeats: int = REPEATS, budget: float = BUDGET_SECONDS
) -> LinkProbe:
    """Measure; all ranks together, and with the same result on each."""
    if world.size < 2 or world.sockets is None:
        raise ValueError("a link is probed between two or more CPU ranks")
    reducers = {
        "exchange": world.reducer(exchange_below=max(sizes)),
        "exchange_bf16": world.reducer(exchange_below=max(sizes), wire="bf16"),
        "all_reduce": world.reducer(exchange_below=0),
    }
    rows: list[SumTimes] = []
    spent = 0.0
    for size in sizes:
        message = torch.ones(size // 4)
        times = {name: _seconds(reducer, message, repeats, world) for name, reducer in reducers.items()}
        medians = {name: statistics.median(seconds) for name, seconds in times.items()}
        rows.append(SumTimes(size, **medians))
        spent += IN_A_ROW * sum(sum(seconds) for seconds in times.values())
        if spent > budget:
            break
    return LinkProbe(tuple(rows), exchange_below(rows), rows[0].exchange, rows[-1].bytes / rows[-1].exchange)


def exchange_below(rows: list[SumTimes]) -> int:
    """The largest size up to which exchanging was never slower."""
    limit = 0
    for row in rows:
        if row.exchange > row.all_reduce:
            break
        limit = row.bytes
    return limit


def chosen_reducer(world: World, *, exchange: str = "fixed", wire: str = "same") -> Reducer:
    """The asynchronous reducer; with ``exchange="measured"`` the link decides what is exchanged and what is all-reduced."""
    if exchange not in EXCHANGES:
        raise ValueError(f"unknown exchange {exchange!r}; choose {' or '.join(EXCHANGES)}")
    if exchange == "fixed" or world.size == 1:
        return world.reducer(wire=wire)
    if world.sockets is None:
        raise ValueError("--exchange measured chooses between ways of CPU ranks; drop it on other devices")
    return world.reducer(exchange_below=probe_link(world).exchange_below, wire=wire)


def _seconds(reducer: Reducer, message: torch.Tensor, repeats: int, world: World) -> list[float]:
    """Per sum; of each repeat the slowest rank's time, the same list on every rank. The first repeat warms up and does not count."""
    times = []
    for _ in range(repeats + 1):
        world.barrier()
        start = time.perf_counter()
        for _ in range(IN_A_ROW):
            reducer.start(message).wait()
        times.append((time.perf_counter() - start) / IN_A_ROW)
    agreed = torch.tensor(times[1:], dtype=torch.float64)
    world.settle()
    dist.all_reduce(agreed, op=dist.ReduceOp.MAX, group=world.group)
    return agreed.tolist()
