"""Emulated links: how long an all-reduce of so many bytes lasts on a machine we do not have.

``parse_link("24us")``, ``parse_link("alpha=12,beta=90")`` (microseconds and GB/s), ``parse_link("h200_sxm-nccl", tp=8)`` (measured
points of ``data/plan/allreduce.csv``), ``parse_link("none")``. ``24us+launch`` is the same as an ordinary kernel, as NCCL's are: it
starts when its message is complete, and nothing that waits for it may start before its end. Whatever is timed with one of these is
an *emulated* result and must be labelled so.
"""

from __future__ import annotations

import csv
import re
from bisect import bisect_right
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources

LINK_FORMS = (
    "none, 24us, alpha=12,beta=90 (microseconds and GB/s), or a measured table such as h200_sxm-nccl; "
    "with +launch behind it, as a kernel that cannot be launched early"
)
LAUNCH = "+launch"


@dataclass(frozen=True)
class Link:
    """Microseconds by message size: fixed + per byte beyond the table's points, linear between them."""

    name: str
    sizes: tuple[int, ...]  # bytes, ascending
    times: tuple[float, ...]  # microseconds
    alpha: float = 0.0
    microseconds_per_byte: float = 0.0
    early: bool = True  # launched before its message is there, and what waits for it before its end

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


def parse_link(text: str, *, tp: int = 8) -> Link:
    text = text.strip().lower()
    if text.endswith(LAUNCH):
        link = parse_link(text.removesuffix(LAUNCH), tp=tp)
        if link.silent or not link.early:
            raise ValueError(f"link {text!r:.60}: {LAUNCH} stands once, behind a link that takes time, as in 24us{LAUNCH}")
        return replace(link, name=link.name + LAUNCH, early=False)
    if text in ("none", "0", "0us"):
        return Link("none", (), ())
    if match := re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*us", text):
        return Link(text, (), (), alpha=float(match[1]))
    if match := re.fullmatch(r"alpha=([0-9]+(?:\.[0-9]+)?),\s*beta=([0-9]+(?:\.[0-9]+)?)", text):
        if float(match[2]) == 0:
            raise ValueError(f"link {text!r:.60}: beta is a bandwidth in GB/s and must be above 0")
        return Link(text, (), (), alpha=float(match[1]), microseconds_per_byte=1e-3 / float(match[2]))
    tables = measured_links()
    name = next((full for full in (text, text.replace("-", "_sxm-", 1)) if any(full == key[0] for key in tables)), None)
    if name is None:
        known = sorted({key[0] for key in tables})
        raise ValueError(f"unknown link {text!r:.60}; write {LINK_FORMS}; tables: {', '.join(known)}")
    if (name, tp) not in tables:
        raise ValueError(
            f"link {name} was not measured on {tp} GPUs, only on {sorted(n for full, n in tables if full == name)}"
        )
    points = tables[name, tp]
    return Link(name, tuple(size for size, _ in points), tuple(time for _, time in points))


@dataclass(frozen=True)
class Emulation:
    """Rank 0 of ``tp`` ranks that are not there."""

    tp: int
    link: Link

    def __str__(self) -> str:
        return f"emulated rank of tp={self.tp}, link {self.link.name}"


def parse_emulation(text: str) -> Emulation:
    """``tp=8,link=h200-nccl``, ``tp=8,link=24us`` or ``tp=8,alpha=12,beta=90``."""
    forms = "tp=8,link=h200-nccl, tp=8,link=24us, tp=8,link=24us+launch or tp=8,alpha=12,beta=90"
    parts = [part.strip().partition("=")[::2] for part in text.split(",")]
    fields = dict(parts)
    if len(fields) < len(parts):
        raise ValueError(f"cannot emulate {text!r:.60}: something is said twice; write {forms}")
    tp = fields.pop("tp", "")
    if not re.fullmatch(r"[0-9]{1,4}", tp) or int(tp) < 2:
        raise ValueError(f"cannot emulate {text!r:.60}: write {forms}, with tp at least 2")
    if set(fields) == {"alpha", "beta"}:
        return Emulation(int(tp), parse_link(f"alpha={fields['alpha']},beta={fields['beta']}"))
    if set(fields) != {"link"}:
        raise ValueError(f"cannot emulate {text!r:.60}: write {forms}")
    return Emulation(int(tp), parse_link(fields["link"], tp=int(tp)))


@cache
def measured_links() -> dict[tuple[str, int], tuple[tuple[int, float], ...]]:
    """(device-library, GPUs) -> (bytes, microseconds) in ascending order."""
    rows = resources.files("ladder_residual").joinpath("data/plan/allreduce.csv").read_text().splitlines()
    found = {}
    for row in csv.DictReader(rows):
        points = [(int(size), float(time)) for size, time in row.items() if size.isdigit() and time]
        found[f"{row['device']}-{row['library']}", int(row["gpus"])] = tuple(sorted(points))
    return found
