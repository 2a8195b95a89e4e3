"""Timelines as data: Chrome/Perfetto JSON of simulated schedules, and the panels that ``timeline_svg`` draws.

Everything here works on plain spans (row, name, start, end in microseconds), so a recorded run can be drawn by the same code.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..plan.planner import Case
from ..plan.schedule import COMM, is_communication

WAITING = "waiting"
EMBEDDING, LOGITS = "embedding all-reduce", "logits"  # of a sharded vocabulary: no wiring can hide them


@dataclass(frozen=True)
class Span:
    row: str  # the stream: compute, compute 2, communication
    name: str
    layer: int
    start: float
    end: float


@dataclass(frozen=True)
class Panel:
    """One wiring of the picture: what runs when, how long a layer takes, how much communication is hidden."""

    title: str
    spans: Sequence[Span]
    layer_us: float
    hidden_percent: float
    label: str  # planned, emulated or measured

    def facts(self) -> dict[str, Any]:
        return {"wiring": self.title, "layer_us": self.layer_us, "hidden_percent": self.hidden_percent}


def recorded_panel(title: str, spans: Iterable[Span], label: str) -> Panel:
    spans = in_rows(spans)
    return Panel(title, spans, layer_us(spans), hidden_percent(spans), label)


def shifted(spans: Iterable[Span], zero: float) -> list[Span]:
    """The same with the time counted from ``zero``."""
    return [replace(span, start=span.start - zero, end=span.end - zero) for span in spans]


def waiting_spans(spans: Iterable[Span]) -> list[Span]:
    """Gaps in which communication runs and no compute row does: the exposed time, shown on the first compute row."""
    spans = list(spans)
    row = next((s.row for s in spans if not is_communication(s.row)), None)
    if row is None:
        return []
    compute = sorted((s.start, s.end) for s in spans if not is_communication(s.row))
    communication = sorted((s for s in spans if is_communication(s.row)), key=lambda s: s.start)
    waits, reach = [], 0.0
    end = max(s.end for s in spans)
    for start, stop in [*compute, (end, end)]:
        for comm in communication:
            low, high = max(comm.start, reach), min(comm.end, start)
            if high - low > 1e-6:
                waits.append(Span(row, WAITING, comm.layer, low, high))
                reach = high  # of two all-reduces in flight at once the time is counted once
        reach = max(reach, stop)
    return waits


def planned_panel(case: Case, wiring: str, *, prefill: bool = False) -> Panel:
    phase = case.prefill_phase() if prefill else case.decode_phase()
    timeline = case.timeline(wiring, phase)
    spans = [Span(t.stream, t.name, t.layer, t.start, t.end) for t in timeline.tasks if t.end > t.start]
    spans += waiting_spans(spans)
    return Panel(wiring, spans, layer_us(spans), 100 * timeline.hidden_share(), "planned")


def layer_us(spans: Sequence[Span]) -> float:
    """Length of a layer in the middle, where the schedule repeats: start of its attention to that of the next."""
    starts = {s.layer: s.start for s in spans if not is_communication(s.row) and s.name.startswith("attention")}
    layers = max((s.layer for s in spans), default=0) + 1
    middle = layers // 2
    if middle in starts and middle + 1 in starts:
        return starts[middle + 1] - starts[middle]
    return (max(s.end for s in spans) - min(s.start for s in spans)) / layers if spans else 0.0


def hidden_percent(spans: Iterable[Span]) -> float:
    """Of the time the layers' all-reduces are in flight, the share in which nobody waits for them; 100 where there are none."""
    spans = list(spans)
    edges = [(s.start, s.end) for s in spans if s.name in (EMBEDDING, LOGITS)]
    total = sum(s.end - s.start for s in spans if is_communication(s.row) and (s.start, s.end) not in edges)
    waiting = sum(
        s.end - s.start
        for s in spans
        if s.name == WAITING and not any(start <= (s.start + s.end) / 2 <= end for start, end in edges)
    )
    return 100.0 if total == 0 else max(0.0, 100 * (1 - waiting / total))


def in_rows(spans: Iterable[Span]) -> list[Span]:
    """All-reduces in flight at the same time on rows of their own, so that none is drawn over another."""
    placed, ends = [], [0.0]
    for span in sorted(spans, key=lambda s: s.start):
        if span.row == COMM:
            row = next((k for k, end in enumerate(ends) if end <= span.start), len(ends))
            ends[row : row + 1] = [span.end]
            span = replace(span, row=COMM if row == 0 else f"{COMM} {row + 1}")
        placed.append(span)
    return placed


def chrome_trace(panels: Sequence[Panel], about: Mapping[str, Any]) -> dict[str, Any]:
    """The trace-event format that Perfetto and chrome://tracing open: a process per wiring, a thread per stream."""
    events: list[dict[str, Any]] = []
    for process, panel in enumerate(panels, start=1):
        name = f"{panel.title} ({panel.label}, {panel.hidden_percent:.0f} % of the communication hidden)"
        events.append({"ph": "M", "pid": process, "name": "process_name", "args": {"name": name}})
        events.append({"ph": "M", "pid": process, "name": "process_sort_index", "args": {"sort_index": process}})
        rows = list(dict.fromkeys(span.row for span in panel.spans))
        for thread, row in enumerate(rows, start=1):
            events.append({"ph": "M", "pid": process, "tid": thread, "name": "thread_name", "args": {"name": row}})
        for span in panel.spans:
            event = {
                "ph": "X",
                "pid": process,
                "tid": rows.index(span.row) + 1,
                "name": span.name,
                "cat": "communication" if is_communication(span.row) else "waiting" if span.name == WAITING else "compute",
                "ts": round(span.start, 4),
                "dur": round(span.end - span.start, 4),
                "args": {"layer": span.layer},
            }
            if span.name == WAITING:
                event["cname"] = "terrible"  # red in chrome://tracing
            events.append(event)
    facts = [{**panel.facts(), "label": panel.label} for panel in panels]
    return {"traceEvents": events, "displayTimeUnit": "ns", "otherData": {**about, "panels": facts}}


def read_trace(document: Mapping[str, Any]) -> list[Panel]:
    """The panels of a ``chrome_trace``."""
    rows = {(e["pid"], e["tid"]): e["args"]["name"] for e in document["traceEvents"] if e["name"] == "thread_name"}
    spans: dict[int, list[Span]] = {}
    for event in document["traceEvents"]:
        if event["ph"] == "X":
            process, start = event["pid"], float(event["ts"])
            row, layer = rows[process, event["tid"]], int(event["args"]["layer"])
            spans.setdefault(process, []).append(Span(row, event["name"], layer, start, start + float(event["dur"])))
    facts = document["otherData"]["panels"]
    panels = [
        Panel(fact["wiring"], spans[process], float(fact["layer_us"]), float(fact["hidden_percent"]), fact["label"])
        for process, fact in enumerate(facts, start=1)
    ]
    numbers = [number for panel in panels for number in (panel.layer_us, panel.hidden_percent)]
    numbers += [time for panel in panels for span in panel.spans for time in (span.start, span.end)]
    if not all(map(math.isfinite, numbers)):
        raise ValueError("a time is NaN or infinite")
    return panels


def write_trace(
    panels: Sequence[Panel], about: Mapping[str, Any], folder: str | Path, drawn: Sequence[Panel] | None = None
) -> tuple[Path, Path]:
    """``trace.json`` and ``timeline.svg`` in ``folder``; ``drawn`` are the panels of the picture if it shows not all."""
    from .timeline_svg import timeline_svg

    folder = Path(folder)
    trace, picture = folder / "trace.json", folder / "timeline.svg"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        trace.write_text(json.dumps(chrome_trace(panels, about)))
        picture.write_text(timeline_svg(drawn or panels, subtitle=str(about.get("setting", ""))))
    except OSError as error:
        raise ValueError(f"cannot write a trace to {folder}: {error.strerror}") from error
    return trace, picture
