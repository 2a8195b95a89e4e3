"""Results of emulated ranks beside the plan: each measured step as a point that says what the model predicts for it.

A point is ``fit`` (constants were fitted on it, so agreeing proves nothing) or ``check``. A result file brings the engine as it was on
that day: where it holds a step without all-reduces, the engine is calibrated on it, and that point is ``fit``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..links.link import Link
from ..models.presets import ModelShape
from .calibration import with_measured_overlap, with_measured_step
from .cost import EngineProfile, Phase, engine
from .hardware import Device, Hardware
from .planner import TWO_STREAM, Case

# For fitting: the shipped profile or link, or one with other constants.
EngineOf = Callable[[str], EngineProfile]
LinkOf = Callable[[Link], Link]


@dataclass(frozen=True)
class Point:
    """One decode step of an emulated rank, in milliseconds."""

    source: str
    group: str
    role: str
    case: Case
    wiring: str
    measured: float
    context: float = 0.0
    quantity: str = "ms_per_step"

    @property
    def tp(self) -> int:
        return self.case.tp

    @property
    def batch(self) -> int:
        return self.case.batch

    @property
    def link(self) -> str:
        return f"{self.case.link.alpha_us:.4g} us"

    @property
    def name(self) -> str:
        return f"{self.group}: {self.wiring}, tp {self.tp}, batch {self.batch}, {self.link}"

    def phase(self) -> Phase:
        return self.case.decode_phase()._replace(context=self.context)

    def predicted(self) -> float:
        return self.case.timeline(self.wiring, self.phase()).us / 1e3


def emulated_rank_points(document: Mapping[str, Any], source: str, hardware: Hardware) -> list[Point]:
    """Points of a result of ``ladder bench decode``, or of a document with ``points`` (docs/planning.md has one)."""
    try:
        if document.get("benchmark") == "decode":
            return calibrate(_decode_points(document, source, hardware))
        rows = [{**document.get("setting", {}), "role": "check", **row} for row in document["points"]]
        points = [emulated_point(row, source, hardware) for row in rows]
        return points if document.get("calibrated") is False else calibrate(points)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            "neither a result of `ladder bench` nor a list of points with device, model, tp, context, engine, batch, allreduce_us, "
            f"wiring and ms; missing or wrong: {error}"
        ) from error


def calibrate(points: list[Point]) -> list[Point]:
    """With engines whose gaps (and overlap of two streams) explain the steps without all-reduces; those steps become ``fit``."""
    done: list[Point] = []
    profiles: dict[int, EngineProfile] = {}  # by the step without all-reduces that it explains
    for point in points:
        like = [p for p in points if _same_but_link(p, point) and p.case.link.alpha_us == 0 and p.role == "check"]
        step = next((p for p in like if p.wiring in ("standard", "ladder", "no-comm")), None)
        if step is not None:
            two = next((p for p in like if p.wiring == TWO_STREAM and p.case.engine.stream_overlap), None)
            if id(step) not in profiles:
                profile = with_measured_step(step.case, step.phase(), step.measured)
                if two is not None:
                    profile = with_measured_overlap(replace(two.case, engine=profile), two.phase(), two.measured)
                profiles[id(step)] = profile
            fitted = point == step or (two is not None and (point.wiring, point.case.link.alpha_us) == (TWO_STREAM, 0))
            case = replace(point.case, engine=profiles[id(step)])
            point = replace(point, case=case, role="fit" if fitted else point.role)
        done.append(point)
    return done


def _same_but_link(a: Point, b: Point) -> bool:
    return replace(a.case, link=b.case.link) == b.case and a.context == b.context


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
        if not row.get("pdl", True):  # what an ordinary launch costs the kernels around it is not in the planner
            continue
        # The copy that stands for an all-reduce lasts as long as it says, so nothing is added to it.
        link = replace(hardware.link("emulated", device), alpha_us=float(row["link_us"]), in_situ_us=0.0)
        model = replace(ModelShape.from_name(data["model"]), num_layers=int(data["layers"]))
        case = _emulated_case({**data, **row}, model, device, link, engine("fused"))
        wiring, schedule, ms = row["wiring"], row["schedule"], float(row["ms_per_token"])
        if schedule == "interleaved":  # which the planner has not: what the engine's start gave the schedules it has
            tried = {name: float(time) for name, time in row["schedules_tried_ms"].items() if name != "interleaved"}
            if not tried:
                continue
            schedule, ms = min(tried.items(), key=lambda item: item[1])
        wiring = TWO_STREAM if wiring == "ladder" and schedule == "two_stream" else wiring
        group = f"{data['model']}, fused on {name}"
        points.append(Point(source, group, "check", case, wiring, ms, float(data["context"])))
    return points


def _emulated_case(row: Mapping[str, Any], model: ModelShape, device: Device, link: Link, engine: EngineProfile) -> Case:
    where: dict[str, Any] = {"model": model, "device": device, "link": link, "engine": engine, "tp": int(row["tp"])}
    return Case(**where, batch=int(row["batch"]), prompt=1, new=2, real_ranks=False)


def emulated_point(
    row: Mapping[str, Any],
    source: str,
    hardware: Hardware,
    engine_of: EngineOf = engine,
    link_of: LinkOf = lambda link: link,
) -> Point:
    device = hardware.device(row["device"])
    link = link_of(hardware.link("emulated", device))
    wait = float(row["allreduce_us"])
    link = replace(link, alpha_us=wait, in_situ_us=link.in_situ_us if wait else 0.0)
    name = row["model"]
    model = ModelShape.from_name(name) if isinstance(name, str) else ModelShape(**name)
    case = _emulated_case(row, model, device, link, engine_of(row["engine"]))
    group = f"{row['engine']} on {row['device']}"
    return Point(source, group, row["role"], case, row["wiring"], float(row["ms"]), float(row["context"]))
