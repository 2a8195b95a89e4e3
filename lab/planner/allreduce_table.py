"""Makes ``assets/plan/allreduce.csv`` from an export of NVIDIA's tables (ai-dynamo/aiconfigurator)."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping

# What the publisher timed -> the name of the library here. Eager launches are left out: nobody decodes that way.
LIBRARIES = {
    "NCCL": "nccl",
    "oneCCL": "oneccl",
    "TRTLLM": "trtllm",
    "vLLM_custom_graph": "vllm",
    "SGLang_CustomAllReduce_graph": "sglang",
}


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
