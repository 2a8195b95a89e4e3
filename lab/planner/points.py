"""Points to compare with: the paper's, our emulated rank's, and result files, each as (what was measured, what the model says).

A point is ``fit`` (constants were fitted on it, or on another form of it, so agreeing proves nothing) or ``check``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ladder_residual.core.config import Wiring
from ladder_residual.links import Link
from ladder_residual.models.presets import ModelShape
from ladder_residual.plan.cost import Work, engine
from ladder_residual.plan.hardware import Hardware, shipped
from ladder_residual.plan.planner import Case
from ladder_residual.plan.points import EngineOf, LinkOf, Point, emulated_point, emulated_rank_points
from ladder_residual.plan.schedule import LayerCost, build, simulate


class PaperPoint(Point):
    """``quantity`` is tokens_per_second, speedup, prefill_speedup or decode_speedup; the link has a name."""

    @property
    def link(self) -> str:
        return self.case.link.name

    def predicted(self) -> float:
        ours = self.case.seconds(self.wiring)
        if self.quantity == "tokens_per_second":
            return self.case.batch * self.case.new / sum(ours)
        standard = self.case.seconds("standard")
        parts = {"speedup": (0, 1), "prefill_speedup": (0,), "decode_speedup": (1,)}[self.quantity]
        return sum(standard[part] for part in parts) / sum(ours[part] for part in parts)


@dataclass(frozen=True)
class SchedulePoint:
    """A wiring measured beside its own compute and communication times (``ladder bench overlap``): tests the schedule alone."""

    source: str
    group: str
    wiring: str
    measured: float
    tp: int
    batch: int
    link: str
    layers: int
    compute_ms: float
    communication_ms: float
    role: str = "check"
    quantity: str = "ms_per_step"

    @property
    def name(self) -> str:
        return f"{self.group}: {self.wiring}, tp {self.tp}, batch {self.batch}, {self.link}"

    def predicted(self) -> float:
        modules = 2 * self.layers
        half = Work(overhead_us=1e3 * self.compute_ms / modules)
        quiet = Link(name="measured", title="measured")
        # On CPU hosts every all-reduce is a message of its own: those of attention and MLP can be on their way together.
        cost = LayerCost(half, half, 1e3 * self.communication_ms / modules, quiet, communicators=2)
        return simulate(build(Wiring.parse(self.wiring, self.layers), cost)).us / 1e3


AnyPoint = Point | SchedulePoint


@cache
def document(name: str) -> dict[str, Any]:
    """``paper``: numbers of arXiv 2501.06589 and its authors' plotting scripts. ``emulated``: one rank of a 70B model on one H200, timed
    before this project's engine existed, with a kernel that waits in the place of an all-reduce."""
    return json.loads(Path(__file__).with_name(f"{name}.json").read_text())


def paper_points(engine_of: EngineOf = engine, link_of: LinkOf = lambda link: link) -> list[Point]:
    """Every speed number of the paper; the 70B table also as speed-up over its standard column."""
    data, hardware = document("paper"), shipped()
    setting = data["setting"]
    device = hardware.device(setting["device"])
    points: list[Point] = []
    standard = {_key(row): row for row in data["points"] if row["wiring"] == "standard"}
    for row in data["points"]:
        case = Case(
            model=ModelShape.from_name(row["model"]),
            device=device,
            link=link_of(hardware.link(row["link"], device)),
            engine=engine_of(setting["engine"]),
            tp=row["tp"],
            batch=row["batch"],
            prompt=setting["prompt"],
            new=setting["new"],
        )
        quantity, value = row["quantity"], row["value"]
        if quantity.endswith("_gain_percent"):  # latency gain g % is a speed-up of 1 / (1 - g / 100)
            quantity, value = quantity.replace("_gain_percent", "_speedup"), 1 / (1 - value / 100)
        group = f"{row['group']} {row['model']}" if row["group"] == "sizes" else row["group"]
        points.append(PaperPoint("paper", group, row["role"], case, row["wiring"], value, quantity=quantity))
        base = standard.get(_key(row))
        if base is not None and row["wiring"] != "standard":
            # A quotient of two numbers is a fit point as soon as both were fitted.
            role = "fit" if row["role"] == base["role"] == "fit" else "check"
            points.append(PaperPoint("paper", group, role, case, row["wiring"], value / base["value"], quantity="speedup"))
    return points


def _key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return row["group"], row["model"], row["tp"], row["batch"], row["link"]


def emulated_points(engine_of: EngineOf = engine, link_of: LinkOf = lambda link: link) -> list[Point]:
    data = document("emulated")
    setting = data["setting"]
    rows = ({**setting, **row, "context": setting["context"]} for row in data["points"])
    return [emulated_point(row, "emulated", shipped(), engine_of, link_of) for row in rows]


def result_points(paths: Iterable[str | Path], source: str, hardware: Hardware) -> list[AnyPoint]:
    """Points of result files: ``ladder bench overlap`` and ``bench decode``, or documents with ``points`` like emulated.json."""
    points: list[AnyPoint] = []
    for path in paths:
        try:
            data = json.loads(Path(path).read_text())
            overlap = data.get("benchmark") == "overlap"
            points += _overlap_points(data, source) if overlap else emulated_rank_points(data, source, hardware)
        except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
            raise ValueError(f"{path} is not a readable JSON result: {error}") from error
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"{path} is no result to compare with; missing or wrong: {error}") from error
    return points


def _overlap_points(data: Mapping[str, Any], source: str) -> list[SchedulePoint]:
    # The step without communication is an input of the prediction, so it is no point of its own.
    return [
        SchedulePoint(
            source=source,
            group=f"{data['layers']} layers of {data['hidden_size']}",
            wiring=row["wiring"],
            measured=float(row["median_ms"]),
            tp=int(data["tp"]),
            batch=int(data["batch"]),
            link=f"{float(data['latency_us']):.0f} us",
            layers=int(data["layers"]),
            compute_ms=float(data["compute_ms"]),
            communication_ms=float(data["communication_ms"]),
        )
        for row in data["rows"]
        if row["wiring"] != "no-comm"
    ]


def is_comparable(file: Path) -> bool:
    """Whether a result file is of a kind this module reads; a folder of results holds others as well."""
    try:
        data = json.loads(file.read_text())
    except (OSError, UnicodeDecodeError, json.JSONDecodeError):
        return False
    if not isinstance(data, dict):
        return False
    emulated = data.get("benchmark") == "decode" and bool(data.get("emulated"))
    return data.get("benchmark") == "overlap" or emulated or "points" in data


def repository_results(root: str | Path = ".") -> tuple[list[Path], list[Path]]:
    """The engine's and the CPU ranks' result files of a checkout, those that can be compared with a plan."""
    engine_files, overlap_files = (
        [file for file in sorted((Path(root) / "results" / kind).glob("*.json")) if is_comparable(file)]
        for kind in ("engine", "overlap")
    )
    return engine_files, overlap_files
