"""Charts of results: what was measured or emulated as dots, what the planner says as lines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..common.charts import MEASURED, PLANNED, Chart, Series
from ..plan.planner import TWO_STREAM
from ..plan.points import Point


def step_chart(key: str, title: str, points: Sequence[Point], note: str = "", *, planned: bool = True) -> Chart:
    """Milliseconds of a decode step of an emulated rank against the time of its all-reduces, the planner's as lines."""
    series = []
    for colour, wiring in enumerate(("standard", "ladder", TWO_STREAM)):
        mine = sorted((p for p in points if p.wiring == wiring), key=lambda p: p.case.link.alpha_us)
        if mine:
            dots = [(p.case.link.alpha_us, p.measured) for p in mine]
            series.append(Series(f"{wiring}, emulated", dots, MEASURED, colour))
            if planned:
                line = [(p.case.link.alpha_us, p.predicted()) for p in mine]
                series.append(Series(f"{wiring}, planned", line, PLANNED, colour))
    return Chart(key, title, "microseconds per all-reduce", "ms per token", series, note=note)


def hybrid_chart(key: str, rows: Sequence[Mapping[str, Any]]) -> Chart:
    """Speed-up against converted layers: the rows of a plan made with ``--hybrid``."""
    series = [
        Series(
            f"tp {row['tp']}, {row['link']}, batch {row['batch']}",
            [(float(point["converted_layers"]), float(point["speedup"])) for point in row["hybrid"]],
            PLANNED,
            colour,
        )
        for colour, row in enumerate(rows)
    ]
    title = f"{rows[0].get('model', key)}: speed-up by converted layers"
    return Chart(key, title, "converted layers (the last k)", "speed-up over standard", series)


def recovery_chart(key: str, name: str, document: Mapping[str, Any]) -> Chart:
    """Held-out loss of a recovery run against the tokens it was trained on, the teacher's as a level line."""
    points = document["curve"]
    series = []
    for colour, (text, found) in enumerate(document["texts"].items()):
        line = [(point["tokens"] / 1e3, float(point["texts"][text]["loss"])) for point in points]
        series.append(Series(text, line, PLANNED, colour))
        if found.get("teacher") is not None:
            level = [(line[0][0], float(found["teacher"])), (line[-1][0], float(found["teacher"]))]
            series.append(Series(f"{text}, the teacher's", level, PLANNED, colour + len(document["texts"])))
    note = "Measured on text that is not trained on; lower is better."
    return Chart(key, f"{name}: held-out loss", "thousand tokens trained on", "loss (nats per token)", series, note=note)


def quality_chart(documents: Sequence[Mapping[str, Any]], others: Sequence[Series] = (), note: str = "") -> Chart:
    series = list(others)
    for index, document in enumerate(documents, start=len(series)):
        points = [(float(row["converted_layers"]), float(row["value"])) for row in document["quality"]]
        series.append(Series(str(document.get("name", "result")), points, MEASURED, index))
    return Chart(
        "quality", "Quality by converted layers", "converted layers (the last k)", "benchmark average, %", series, note=note
    )
