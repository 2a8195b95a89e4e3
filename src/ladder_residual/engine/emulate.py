"""Emulated links: how long an all-reduce of so many bytes lasts on a machine we do not have.

``parse_link("24us")``, ``parse_link("alpha=12,beta=90")`` (microseconds, GB/s), ``parse_link("h200-nccl", tp=8)`` (measured table),
``parse_link("none")``. Whatever is timed with one of these is an *emulated* result and must be labelled so.
"""

from __future__ import annotations

import csv
import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

LINK_FORMS = "none, 24us, alpha=12,beta=90 (microseconds and GB/s), or a table name such as h200-nccl with its CSV"
# name -> (the table's `file`, its `kernel_source`); the newest measurement of each
TABLES = {
    "h200-nccl": ("h200_sxm_nccl_2.26.2_nccl", "NCCL"),
    "h100-nccl": ("h100_sxm_nccl_2.27.3_nccl", "NCCL"),
    "h200-vllm": ("h200_sxm_vllm_0.24.0_custom_allreduce", "vLLM_custom_graph"),
    "h200-trtllm": ("h200_sxm_trtllm_1.3.0rc20_custom_allreduce", "TRTLLM"),
    "h200-sglang": ("h200_sxm_sglang_0.5.14_custom_allreduce", "SGLang_CustomAllReduce_graph"),
}


@dataclass(frozen=True)
class Link:
    """Microseconds by message size: fixed + per byte beyond the table's points, linear between them."""

    name: str
    sizes: tuple[int, ...]  # bytes, ascending
    times: tuple[float, ...]  # microseconds
    alpha: float = 0.0
    microseconds_per_byte: float = 0.0

    def microseconds(self, size: int) -> float:
        if not self.sizes:
            return self.alpha + self.microseconds_per_byte * size
        if size <= self.sizes[0]:
            return self.times[0]
        if size >= self.sizes[-1]:  # bandwidth-bound: grows in proportion
            return self.times[-1] * size / self.sizes[-1]
        at = bisect_right(self.sizes, size)
        s0, s1, t0, t1 = self.sizes[at - 1], self.sizes[at], self.times[at - 1], self.times[at]
        return t0 + (t1 - t0) * (size - s0) / (s1 - s0)

    @property
    def silent(self) -> bool:
        return self.microseconds(1) == 0 and self.microseconds(1 << 30) == 0


def parse_link(text: str, *, tp: int = 8, table: str | Path | None = None) -> Link:
    """``table``: CSV with columns file, kernel_source, num_gpus, bytes, us, for the named links."""
    text = text.strip().lower()
    if text in ("none", "0", "0us"):
        return Link("none", (), ())
    if match := re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*us", text):
        return Link(text, (), (), alpha=float(match[1]))
    if match := re.fullmatch(r"alpha=([0-9.]+),\s*beta=([0-9.]+)", text):
        return Link(text, (), (), alpha=float(match[1]), microseconds_per_byte=1e-3 / float(match[2]))
    if text in TABLES:
        if table is None:
            raise ValueError(f"link {text!r} is a measured table: pass the path of its CSV")
        return _read_table(text, tp, Path(table))
    raise ValueError(f"unknown link {text!r:.60}; write {LINK_FORMS}; tables: {', '.join(TABLES)}")


def _read_table(name: str, tp: int, path: Path) -> Link:
    file, source = TABLES[name]
    points: dict[int, float] = {}
    counts = set()
    with path.open(newline="") as handle:
        for row in csv.DictReader(handle):
            if row["file"] == file and row["kernel_source"] == source:
                counts.add(int(row["num_gpus"]))
                if int(row["num_gpus"]) == tp:
                    points[int(row["bytes"])] = float(row["us"])
    if not points:
        raise ValueError(f"{path} has no {name} points for {tp} GPUs; it has {sorted(counts) or 'none at all'}")
    sizes = sorted(points)
    return Link(name, tuple(sizes), tuple(points[size] for size in sizes))


def describe(links: Sequence[Link]) -> str:
    return ", ".join(link.name for link in links)
