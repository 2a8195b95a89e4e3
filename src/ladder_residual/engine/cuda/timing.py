"""Times of work on a GPU, by its own clock."""

from __future__ import annotations

from collections.abc import Callable

import torch


def time_on_device(call: Callable[[], object], repeats: int, before: Callable[[], object] = lambda: None) -> list[float]:
    """Milliseconds between two events around each call; ``before`` runs ahead of each and is not timed."""
    times = []
    for _ in range(repeats):
        before()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return times
