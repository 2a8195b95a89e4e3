"""Wall-clock times of calls on a GPU, and what a benchmark says of repeated ones."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import torch

from ..distributed.world import World

ONE_PROCESS = World()


def time_calls(call: Callable[[], object], repeats: int, *, warm_up: bool = True) -> list[float]:
    """Milliseconds of wall-clock time until the device is done; after one call to warm up."""
    if warm_up:
        call()
    torch.cuda.synchronize()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    return times


def time_calls_in_turns(
    calls: Mapping[str, Callable[[], object]], repeats: int, world: World = ONE_PROCESS
) -> dict[str, list[float]]:
    """``time_calls`` of each, in turns: the host starts kernels one by one, and its speed drifts. Of the ranks of ``world`` the slowest
    counts."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(repeats + 1):
        for name, call in calls.items():
            world.barrier()
            times = world.slowest(time_calls(call, 1, warm_up=False))
            taken[name] += times if turn else []  # the first ones warm up
    return taken


def spread(times: Sequence[float]) -> dict[str, float | int]:
    """Tenth and ninetieth percentile of milliseconds, and the number of runs behind a median."""
    ordered = sorted(times)
    return {
        "p10_ms": round(ordered[len(ordered) // 10], 4),
        "p90_ms": round(ordered[min(len(ordered) * 9 // 10, len(ordered) - 1)], 4),
        "runs": len(ordered),
    }


def quartiles(seconds: Sequence[float]) -> dict[str, float]:
    """Median and quartiles of seconds, in milliseconds."""
    low, middle, high = statistics.quantiles(seconds, n=4)
    return {"median_ms": 1e3 * middle, "p25_ms": 1e3 * low, "p75_ms": 1e3 * high}
