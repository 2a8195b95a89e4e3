"""Milliseconds of calls on a GPU."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch


def time_on_device(call: Callable[[], object], repeats: int) -> list[float]:
    """Between two events around each call."""
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return times


def time_calls(call: Callable[[], object], repeats: int, *, warm_up: bool = True) -> list[float]:
    """By the clock on the wall, until the device is done; after one call to warm up."""
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
