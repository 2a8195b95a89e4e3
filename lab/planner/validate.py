"""``python -m lab.planner validate``: the model against every number it can be compared with, and a verdict.

Fit points and checked points are kept apart: only checked points count. A checked point outside its target fails the run,
unless it is listed in ``KNOWN_MISSES`` with the reason and a bound of its own, which it must keep; it is reported as a miss all
the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lab.planner.fit import ASSUMED, CONSTANTS
from lab.planner.points import AnyPoint, emulated_points, paper_points, result_points
from ladder_residual.plan.hardware import Hardware, shipped

# Per cent. The first three are the targets this model was built for; the others are what it is held to beyond them.
TARGETS = {
    "ladder over standard, NVLink": 5.0,
    "ladder over standard, no NVLink": 10.0,
    "standard, tokens/s": 15.0,
    "other wirings, speed-up": 12.0,
    "other wirings, tokens/s": 20.0,
    "emulated rank, ms": 5.0,
    "engine on an emulated rank, ms": 10.0,
    "CPU ranks, ms": 10.0,
}


@dataclass(frozen=True)
class KnownMiss:
    group: str
    link: str
    batch: int
    wiring: str
    bound: float  # per cent
    why: str
    quantity: str = "speedup"


KNOWN_MISSES = (
    KnownMiss(
        "sizes codellama-34b", "nccl", 4, "ladder", 10.0,
        "the paper's 1.44 is what removing all communication gives in this model (1.45): nothing would be left for contention. "
        "34B and 70B send the same messages, and the paper's 70B gains 1.29",
    ),
    KnownMiss(
        "sizes bloom-176b", "nccl", 4, "ladder", 18.0,
        "a module of 176B reads 308 MB per rank, 92 us at the full 3.35 TB/s; hiding an all-reduce of 27 us cannot give more "
        "than 1.29, the paper says 1.35: its all-reduce or its shape was another",
    ),
    KnownMiss(
        "sizes bloom-176b", "nccl-no-p2p", 4, "ladder", 18.0,
        "as with NVLink: 1.54 needs an all-reduce about twice as long as on the 70B model with P2P off",
    ),
    KnownMiss(
        "405B", "ib-2-nodes", 8, "ladder", 8.0,
        "the paper's batch 8 lies above both neighbours (1.308, 1.393, 1.349 at batch 4, 8, 16), and so does its no-comm "
        "bound; a model that is smooth in the batch cannot follow",
    ),
    KnownMiss(
        "llama-3.1-405b, fused on h200", "24 us", 1, "ladder two-stream", 22.0,
        "two streams were not timed without all-reduces there, so how well they fill each other's gaps is taken from 70B; and in the plan "
        "nothing hides the MLP's all-reduce",
        "ms_per_step",
    ),
    KnownMiss(
        "llama-3-70b, fused on h200", "5 us", 1, "ladder two-stream", 12.0,
        "two streams are faster with all-reduces of 5 us (4.50 ms) than without any (4.55 to 4.57), which is what the overlap is "
        "calibrated on; perhaps because without a pause both chains want the memory at the same time",
        "ms_per_step",
    ),
    *(
        KnownMiss(
            "llama-3-70b, fused on h200", link, batch, "ladder two-stream", bound,
            "in the plan an MLP and the attention above it begin together, when the MLP's all-reduce is done, and nothing hides it. With "
            "attention a layer ahead from the start and the MLP favoured 70 to 30 it would be within 6 % here and 11 % off the prototype "
            "(tried). Two streams without a link, which calibrate it, varied between two earlier runs (batch 16: 5.72 and 5.93 ms)",
            "ms_per_step",
        )
        for link, batch, bound in (("18 us", 4, 14.0), ("18 us", 16, 17.0), ("24 us", 16, 19.0))
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Comparison:
    point: AnyPoint
    predicted: float
    target: str

    @property
    def error_percent(self) -> float:
        return 100 * (self.predicted / self.point.measured - 1)

    @property
    def known_miss(self) -> KnownMiss | None:
        point = self.point
        for miss in KNOWN_MISSES:
            here = (point.group, point.link, point.batch, point.wiring, point.quantity)
            if here == (miss.group, miss.link, miss.batch, miss.wiring, miss.quantity):
                return miss
        return None

    @property
    def status(self) -> str:
        """fit: not a validation; ok: within target; miss: outside, known and within its bound; FAIL: outside."""
        if self.point.role == "fit":
            return "fit"
        if abs(self.error_percent) <= TARGETS[self.target]:
            return "ok"
        miss = self.known_miss
        return "miss" if miss is not None and abs(self.error_percent) <= miss.bound else "FAIL"

    def to_dict(self) -> dict[str, Any]:
        point = self.point
        return {
            "source": point.source,
            "group": point.group,
            "wiring": point.wiring,
            "tp": point.tp,
            "batch": point.batch,
            "link": point.link,
            "quantity": point.quantity,
            "measured": point.measured,
            "predicted": self.predicted,
            "error_percent": self.error_percent,
            "target": self.target,
            "target_percent": TARGETS[self.target],
            "role": point.role,
            "status": self.status,
            "why": self.known_miss.why if self.status == "miss" and self.known_miss else None,
        }


@dataclass(frozen=True)
class Validation:
    comparisons: Sequence[Comparison]
    absent: Sequence[str]  # sentences about what there was nothing to compare with

    @property
    def passed(self) -> bool:
        return all(c.status != "FAIL" for c in self.comparisons)

    def checked(self) -> list[Comparison]:
        return [c for c in self.comparisons if c.point.role == "check"]

    def misses(self) -> list[Comparison]:
        return [c for c in self.comparisons if c.status in ("miss", "FAIL")]

    def summary(self) -> list[dict[str, Any]]:
        """One row per target: how many points, how many meet it, the worst error."""
        rows = []
        for target, bound in TARGETS.items():
            here = [c for c in self.checked() if c.target == target]
            if here:
                worst = max(here, key=lambda c: abs(c.error_percent))
                inside = sum(c.status == "ok" for c in here)
                rows.append(
                    {
                        "target": target,
                        "target_percent": bound,
                        "checked": len(here),
                        "inside": inside,
                        "worst_percent": worst.error_percent,
                        "worst_point": worst.point.name,
                    }
                )
        return rows

    def to_dict(self) -> dict[str, Any]:
        return {
            "passed": self.passed,
            "fit_points": sum(c.point.role == "fit" for c in self.comparisons),
            "checked_points": len(self.checked()),
            "summary": self.summary(),
            "absent": list(self.absent),
            "constants": [{"constant": c.key, "value": c.shipped, **asdict(c)} for c in CONSTANTS],
            "assumed": [{"what": what, "value": value, "why": why} for what, value, why in ASSUMED],
            "points": [c.to_dict() for c in self.comparisons],
        }


def validate(
    engine_results: Iterable[str | Path] = (), overlap_results: Iterable[str | Path] = (), hardware: Hardware | None = None
) -> Validation:
    """Compare with the paper, the emulated rank, and result files of this project where there are any."""
    hardware = hardware or shipped()
    points: list[AnyPoint] = [*paper_points(), *emulated_points()]
    absent = []
    for paths, source, what in (
        (list(engine_results), "engine", "emulated-rank results of the engine (results/engine/*.json)"),
        (list(overlap_results), "overlap", "CPU/gloo results (results/overlap/*.json)"),
    ):
        points += result_points(paths, source, hardware)
        if not paths:
            absent.append(f"no {what} were given: nothing is said about them")
    return Validation([Comparison(p, p.predicted(), _target(p)) for p in points], absent)


def _target(point: AnyPoint) -> str:
    if point.source == "emulated":
        return "emulated rank, ms"
    if point.source != "paper":
        return "engine on an emulated rank, ms" if point.source == "engine" else "CPU ranks, ms"
    if point.quantity == "tokens_per_second":
        return "standard, tokens/s" if point.wiring == "standard" else "other wirings, tokens/s"
    if point.wiring == "ladder":
        return f"ladder over standard, {'no ' if 'no-p2p' in point.link else ''}NVLink"
    return "other wirings, speed-up"
