"""Wall-clock times of calls on a GPU, and what a benchmark says of repeated ones."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch


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
