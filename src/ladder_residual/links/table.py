"""Measured all-reduce latencies: one small CSV of package data, read and interpolated.

A row of the CSV is (device, library, gpus) and one latency in microseconds per message size. The numbers are NVIDIA's
(ai-dynamo/aiconfigurator, Apache-2.0; see ``assets/plan/README.md``).
"""

from __future__ import annotations

import csv
import math
from bisect import bisect_left
from collections import defaultdict
from functools import cache
from importlib import resources

Curve = tuple[tuple[int, float], ...]  # (bytes, microseconds), ascending in bytes


def interpolate(curve: Curve, size: float) -> float:
    """Latency at ``size`` bytes: log time over log size between measured points, by bandwidth beyond the largest one."""
    sizes = [point[0] for point in curve]
    if size <= sizes[0]:
        return curve[0][1]  # below the smallest message only latency is left
    if size >= sizes[-1]:
        return curve[-1][1] * size / sizes[-1]
    right = bisect_left(sizes, size)
    (low, low_us), (high, high_us) = curve[right - 1], curve[right]
    share = math.log(size / low) / math.log(high / low)
    # Interpolating the logarithm of the time keeps the bandwidth-limited end (time proportional to size) exact.
    return math.exp(math.log(low_us) * (1 - share) + math.log(high_us) * share)


@cache
def tables() -> dict[tuple[str, str], dict[int, Curve]]:
    """(device, library) -> number of GPUs -> curve."""
    text = resources.files("ladder_residual").joinpath("assets/plan/allreduce.csv").read_text()
    return read_tables(text)


def read_tables(text: str) -> dict[tuple[str, str], dict[int, Curve]]:
    rows = csv.reader(text.splitlines())
    sizes = [int(column) for column in next(rows)[3:]]
    found: dict[tuple[str, str], dict[int, Curve]] = defaultdict(dict)
    for device, library, gpus, *values in rows:
        found[device, library][int(gpus)] = tuple(
            (size, float(value)) for size, value in zip(sizes, values, strict=True) if value
        )
    return dict(found)
