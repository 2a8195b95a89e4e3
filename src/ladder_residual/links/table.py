"""Measured all-reduce latencies: one small CSV of package data, read and interpolated.

A row of the CSV is (device, library, gpus) and one latency in microseconds per message size. The numbers are NVIDIA's
(ai-dynamo/aiconfigurator, Apache-2.0; see ``data/plan/README.md``); ``compact`` makes the file from a newer export of theirs.
"""

from __future__ import annotations

import csv
import io
import math
import statistics
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import cache
from importlib import resources

# What the publisher timed -> the name of the library here. Eager launches are left out: nobody decodes that way.
LIBRARIES = {
    "NCCL": "nccl",
    "oneCCL": "oneccl",
    "TRTLLM": "trtllm",
    "vLLM_custom_graph": "vllm",
    "SGLang_CustomAllReduce_graph": "sglang",
}
Curve = tuple[tuple[int, float], ...]  # (bytes, microseconds), ascending in bytes


def interpolate(curve: Curve, size: float) -> float:
    """Latency at ``size`` bytes: linear in log size between measured points, by bandwidth beyond the largest one."""
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
    text = resources.files("ladder_residual").joinpath("data/plan/allreduce.csv").read_text()
    return read_tables(text)


def read_tables(text: str) -> dict[tuple[str, str], dict[int, Curve]]:
    rows = csv.reader(line for line in io.StringIO(text) if not line.startswith("#"))
    sizes = [int(column) for column in next(rows)[3:]]
    found: dict[tuple[str, str], dict[int, Curve]] = defaultdict(dict)
    for device, library, gpus, *values in rows:
        found[device, library][int(gpus)] = tuple(
            (size, float(value)) for size, value in zip(sizes, values, strict=True) if value
        )
    return dict(found)


def compact(rows: Iterable[Mapping[str, str]]) -> str:
    """The CSV of this package from rows with file, kernel_source, num_gpus, bytes and us.

    Several versions of a library were measured and single points are outliers (38 us between neighbours of 3.5 us), so a cell
    is the median over versions and repetitions; what is then still slower than a larger message takes that message's time
    (padding is always possible).
    """
    cells: dict[tuple[str, str, int], dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        library = LIBRARIES.get(row["kernel_source"])
        size = int(row["bytes"])
        if library is None or size & (size - 1) or size < 512:
            continue
        publisher = _library_in_name(row["file"])
        if publisher not in (library, "trtllm"):
            continue  # one engine's data set that timed another engine's kernel
        device = row["file"].split(f"_{publisher}_")[0]
        cells[device, library, int(row["num_gpus"])][size].append(float(row["us"]))
    sizes = sorted({size for cell in cells.values() for size in cell})
    lines = [",".join(["device", "library", "gpus", *map(str, sizes)])]
    for (device, library, gpus), cell in sorted(cells.items()):
        medians: dict[int, float] = {}
        for size in sorted(cell, reverse=True):
            larger = min(medians.values(), default=math.inf)
            medians[size] = min(statistics.median(cell[size]), larger)
        values = [f"{medians[size]:.4g}" if size in medians else "" for size in sizes]
        lines.append(",".join([device, library, str(gpus), *values]))
    return "\n".join(lines) + "\n"


def _library_in_name(file: str) -> str:
    for name in ("nccl", "sglang", "trtllm", "vllm", "oneccl"):
        if f"_{name}_" in file:
            return name
    raise ValueError(f"data set name {file!r} names no known library")
