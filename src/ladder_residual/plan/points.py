"""Points to compare with: the paper's, our emulated rank's, and result files, each as (what was measured, what the model says).

A point is ``fit`` (constants were fitted on it, or on another form of it, so agreeing proves nothing) or ``check``. Result
files bring engines as they were on that day: where one holds a step without all-reduces, the engine is calibrated on it, and
that point is ``fit``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from ..config import Wiring
from ..presets import ModelShape
from .calibration import with_measured_lanes, with_measured_step
from .cost import EngineProfile, Phase, Work, engine
from .hardware import Hardware, Link, shipped
from .planner import TWO_LANES, Case
from .schedule import LayerCost, build, simulate

# For fitting: the shipped profile or link by name, or one with other constants.
EngineOf = Callable[[str], EngineProfile]
LinkOf = Callable[[Link], Link]


@dataclass(frozen=True)
class Point:
    source: str  # paper, emulated, engine, overlap
    group: str
    role: str
    case: Case
    wiring: str
    quantity: str  # tokens_per_second, speedup, prefill_speedup, decode_speedup, ms_per_step
    measured: float
    context: float = 0.0  # of ms_per_step

    @property
    def tp(self) -> int:
        return self.case.tp

    @property
    def batch(self) -> int:
        return self.case.batch

    @property
    def link(self) -> str:
        return self.case.link.name if self.source == "paper" else f"{self.case.link.alpha_us:.4g} us"

    @property
    def name(self) -> str:
        return f"{self.group}: {self.wiring}, tp {self.tp}, batch {self.batch}, {self.link}"

    def predicted(self) -> float:
        case = self.case
        if self.quantity == "ms_per_step":
            return case.timeline(self.wiring, _phase(self)).us / 1e3
        ours = case.seconds(self.wiring)
        if self.quantity == "tokens_per_second":
            return case.batch * case.new / sum(ours)
        standard = case.seconds("standard")
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
        # On CPU hosts every sum is a message of its own: those of attention and MLP can be on their way together.
        cost = LayerCost(half, half, 1e3 * self.communication_ms / modules, quiet, communicators=2)
        return simulate(build(Wiring.parse(self.wiring, self.layers), cost)).us / 1e3


AnyPoint = Point | SchedulePoint


@cache
def document(name: str) -> dict[str, Any]:
    return json.loads(resources.files("ladder_residual").joinpath(f"data/plan/{name}.json").read_text())


def paper_points(engine_of: EngineOf = engine, link_of: LinkOf = lambda link: link) -> list[Point]:
    """Every speed number of the paper; the 70B table also as speed-up over its standard column."""
    data, hardware = document("paper"), shipped()
    setting = data["setting"]
    device = hardware.device(setting["device"])
    points = []
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
        points.append(Point("paper", group, row["role"], case, row["wiring"], quantity, value))
        base = standard.get(_key(row))
        if base is not None and row["wiring"] != "standard":
            # A quotient of two numbers is a fit point as soon as both were fitted.
            role = "fit" if row["role"] == base["role"] == "fit" else "check"
            points.append(Point("paper", group, role, case, row["wiring"], "speedup", value / base["value"]))
    return points


def _key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return row["group"], row["model"], row["tp"], row["batch"], row["link"]


def emulated_points(engine_of: EngineOf = engine, link_of: LinkOf = lambda link: link) -> list[Point]:
    data = document("emulated")
    setting = data["setting"]
    rows = ({**setting, **row, "context": setting["context"]} for row in data["points"])
    return [_emulated_point(row, "emulated", shipped(), engine_of, link_of) for row in rows]


def result_points(paths: Iterable[str | Path], source: str, hardware: Hardware) -> list[AnyPoint]:
    """Points of result files: ``ladder bench overlap`` documents, or ``points`` as in ``data/plan/emulated.json``."""
    points: list[AnyPoint] = []
    for path in paths:
        try:
            data = json.loads(Path(path).read_text())
            if data.get("benchmark") == "overlap":
                points += _overlap_points(data, source)
            elif data.get("benchmark") == "decode":
                points += calibrate(_decode_points(data, source, hardware))
            else:
                rows = [{**data.get("setting", {}), "role": "check", **row} for row in data["points"]]
                made = [_emulated_point(row, source, hardware, engine, lambda link: link) for row in rows]
                points += made if data.get("calibrated") is False else calibrate(made)
        except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
            raise ValueError(f"{path} is not a readable JSON result: {error}") from error
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{path} is neither a result of `ladder bench overlap` nor a list of points with device, model, tp, context, "
                f"engine, batch, allreduce_us, wiring and ms; missing or wrong: {error}"
            ) from error
    return points


def calibrate(points: list[Point]) -> list[Point]:
    """Engines whose gaps (and lanes) explain the measured steps without all-reduces; points used for that become ``fit``."""
    done: list[Point] = []
    for point in points:
        like = [p for p in points if _same_but_link(p, point) and p.case.link.alpha_us == 0 and p.role == "check"]
        quiet = next((p for p in like if p.wiring in ("standard", "ladder", "no-comm")), None)
        if quiet is not None:
            profile = with_measured_step(point.case, _phase(point), quiet.measured)
            point = replace(point, case=replace(point.case, engine=profile), role="fit" if point == quiet else point.role)
            lanes = next((p for p in like if p.wiring == TWO_LANES), None)
            if lanes is not None and profile.lane_overlap:
                profile = with_measured_lanes(replace(lanes.case, engine=profile), _phase(point), lanes.measured)
                role = "fit" if (point.wiring, point.case.link.alpha_us) == (TWO_LANES, 0) else point.role
                point = replace(point, case=replace(point.case, engine=profile), role=role)
        done.append(point)
    return done


def _phase(point: Point) -> Phase:
    return point.case.decode_phase()._replace(context=point.context)


def _same_but_link(a: Point, b: Point) -> bool:
    return replace(a.case, link=b.case.link) == b.case and a.context == b.context


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


def _decode_points(data: Mapping[str, Any], source: str, hardware: Hardware) -> list[Point]:
    """Steps of an emulated rank (``ladder bench decode``), on the device as fast as it was during that run."""
    card = str(data["gpu"]).lower()
    name = next((name for name in hardware.devices if name.replace("-", " ") in card), None)
    if name is None:
        raise ValueError(f"no device of the planner is called like {data['gpu']!r}; give one with --hardware")
    read = 1e3 * float(data["read_bandwidth_tb_s"])
    device = replace(hardware.device(name), bandwidth_gbs=read, bandwidth_share=1.0)
    points = []
    for row in data["rows"]:
        if not row.get("early", True):  # what an ordinary launch costs the kernels around it is not in the planner
            continue
        # The copy that stands for an all-reduce lasts as long as it says, so nothing is added to it.
        link = replace(hardware.link("emulated", device), alpha_us=float(row["link_us"]), in_situ_us=0.0)
        case = Case(
            model=replace(ModelShape.from_name(data["model"]), num_layers=int(data["layers"])),
            device=device,
            link=link,
            engine=engine("fused"),
            tp=int(data["tp"]),
            batch=int(row["batch"]),
            prompt=1,
            new=2,
            real_ranks=False,
        )
        wiring, schedule, ms = row["wiring"], row["schedule"], float(row["ms_per_token"])
        if schedule == "woven":  # which the planner has not: what the engine's start gave the schedules it has
            tried = {name: float(time) for name, time in row["schedules_tried_ms"].items() if name != "woven"}
            if not tried:
                continue
            schedule, ms = min(tried.items(), key=lambda item: item[1])
        wiring = TWO_LANES if wiring == "ladder" and schedule == "two" else wiring
        group = f"{data['model']}, fused on {name}"
        context = float(data["context"])
        points.append(Point(source, group, "check", case, wiring, "ms_per_step", ms, context))
    return points


def _emulated_point(row: Mapping[str, Any], source: str, hardware: Hardware, engine_of: EngineOf, link_of: LinkOf) -> Point:
    device = hardware.device(row["device"])
    link = link_of(hardware.link("emulated", device))
    wait = float(row["allreduce_us"])
    link = replace(link, alpha_us=wait, in_situ_us=link.in_situ_us if wait else 0.0)
    name = row["model"]
    case = Case(
        model=ModelShape.from_name(name) if isinstance(name, str) else ModelShape(**name),
        device=device,
        link=link,
        engine=engine_of(row["engine"]),
        tp=int(row["tp"]),
        batch=int(row["batch"]),
        prompt=1,
        new=2,
        real_ranks=False,
    )
    group = f"{row['engine']} on {row['device']}"
    return Point(source, group, row["role"], case, row["wiring"], "ms_per_step", float(row["ms"]), float(row["context"]))
