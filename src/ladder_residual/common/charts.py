"""Charts as data, drawn as SVG: small, in the reader's light or dark scheme, without a dependency.

How a series is drawn says where its numbers come from: a line is planned, rings are the paper's, filled dots were measured or
emulated by this project.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

PLANNED, PAPER, MEASURED = "planned", "paper", "measured"
LIGHT = ("#2f6feb", "#c2410c", "#1f9d8a", "#8250df", "#9a6700", "#57606a")
DARK = ("#6ea8ff", "#ff9b5e", "#4fd1bd", "#c29bff", "#e3b341", "#afb8c1")
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 560, 340, 52, 14, 34, 46
INSET = 10  # room for dots at the ends of the x axis
Frame = tuple[float, float, float, float]  # the least and the largest x, the least and the largest y


@dataclass(frozen=True)
class Series:
    name: str
    points: Sequence[tuple[float, float]]
    kind: str = PLANNED
    colour: int = 0  # series of one colour belong together (the plan and the paper's dots of one wiring)


@dataclass(frozen=True)
class Chart:
    key: str  # file name and anchor
    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    ticks: Sequence[tuple[float, str]] = ()  # names instead of numbers on the x axis
    note: str = ""


def style() -> str:
    light = "".join(f".c{i}{{--c:{colour}}}" for i, colour in enumerate(LIGHT))
    dark = "".join(f".c{i}{{--c:{colour}}}" for i, colour in enumerate(DARK))
    return (
        f"{light}.chart-bg{{fill:#ffffff}}.chart-ink{{fill:#1f2328}}.chart-soft{{fill:#59636e}}.chart-grid{{stroke:#d1d9e0}}"
        ".chart-line{fill:none;stroke:var(--c);stroke-width:2.2}.chart-dot{fill:var(--c);stroke:var(--c)}"
        ".chart-ring{fill:none;stroke:var(--c);stroke-width:2}"
        "text{font-family:system-ui,-apple-system,'Segoe UI',Helvetica,Arial,sans-serif}"
        f"@media (prefers-color-scheme:dark){{{dark}.chart-bg{{fill:#0d1117}}.chart-ink{{fill:#f0f6fc}}"
        ".chart-soft{fill:#9198a1}.chart-grid{stroke:#3d444d}}"
    )


def _place(x: float, y: float, frame: Frame) -> tuple[float, float]:
    low_x, high_x, low_y, high_y = frame
    across = (x - low_x) / (high_x - low_x) if high_x > low_x else 0.5
    up = (y - low_y) / (high_y - low_y)
    left, right = LEFT + INSET, WIDTH - RIGHT - INSET
    return left + across * (right - left), HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM)


def round_step(least: float) -> float:
    """The next round number from ``least`` on."""
    power = 10 ** math.floor(math.log10(least))
    return next(power * m for m in (1, 2, 2.5, 5, 10) if power * m >= least)


def nice_ticks(low: float, high: float) -> list[float]:
    """About five round numbers that cover low to high."""
    if not high > low:
        return [low]
    step = round_step((high - low) / 5)
    first = math.floor(low / step)
    return [round(step * (first + i), 10) for i in range(math.ceil(high / step) - first + 1)]


def _frame(chart: Chart) -> tuple[Frame, list[float]]:
    points = [point for series in chart.series for point in series.points]
    if not points:
        raise ValueError(f"chart {chart.key} has no points")
    if not all(math.isfinite(number) for point in points for number in point):
        raise ValueError(f"chart {chart.key} has a point that is NaN or infinite")
    y_ticks = nice_ticks(min(y for _, y in points), max(y for _, y in points))
    if len(y_ticks) == 1:
        y_ticks = [y_ticks[0] - 1, y_ticks[0] + 1]
    xs = [x for x, _ in points]
    return (min(xs), max(xs), y_ticks[0], y_ticks[-1]), y_ticks


def chart_svg(chart: Chart, *, standalone: bool = True) -> str:
    frame, y_ticks = _frame(chart)
    columns = 2 if max(len(series.name) for series in chart.series) <= 26 else 1  # long names would run into each other
    legend_rows = math.ceil(len(chart.series) / columns)
    height = HEIGHT + 18 * legend_rows + 6
    parts = [f'<text class="chart-ink" x="{LEFT}" y="18" font-size="14" font-weight="600">{escape(chart.title)}</text>']
    for tick in y_ticks:
        _, y = _place(frame[0], tick, frame)
        parts.append(f'<line class="chart-grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(
            f'<text class="chart-soft" x="{LEFT - 7}" y="{y + 4:.1f}" font-size="11" text-anchor="end">{tick:g}</text>'
        )
    numbers = [(tick, f"{tick:g}") for tick in nice_ticks(frame[0], frame[1]) if frame[0] <= tick <= frame[1]]
    for value, text in chart.ticks or numbers:
        x, _ = _place(value, frame[2], frame)
        anchor = "end" if x > WIDTH - RIGHT - 12 and len(text) > 4 else "start" if x < LEFT + 12 and len(text) > 4 else "middle"
        at = HEIGHT - BOTTOM + 16
        parts.append(
            f'<text class="chart-soft" x="{x:.1f}" y="{at}" font-size="11" text-anchor="{anchor}">{escape(text)}</text>'
        )
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(
        f'<text class="chart-soft" x="{middle}" y="{HEIGHT - 10}" font-size="12" text-anchor="middle">'
        f"{escape(chart.x_label)}</text>"
        f'<text class="chart-soft" x="12" y="{HEIGHT / 2}" font-size="12" text-anchor="middle" '
        f'transform="rotate(-90 12 {HEIGHT / 2})">{escape(chart.y_label)}</text>'
    )
    parts += [_series_svg(series, frame) for series in chart.series]
    for index, series in enumerate(chart.series):
        parts.append(_legend_entry(series, LEFT + (index % columns) * 250, HEIGHT + 8 + 18 * (index // columns)))
    css = f"<style>{style()}</style>" if standalone else ""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        f'aria-label="{escape(chart.title, quote=True)}">{css}<rect class="chart-bg" width="{WIDTH}" height="{height}"/>'
        + "".join(parts)
        + "</svg>"
    )


def _series_svg(series: Series, frame: Frame) -> str:
    places = [_place(x, y, frame) for x, y in series.points]
    marks = []
    if series.kind == PLANNED:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        marks.append(f'<polyline class="chart-line" points="{path}"/>')
    for (x, y), (value_x, value_y) in zip(places, series.points, strict=True):
        css, radius = {PLANNED: ("chart-dot", 2.2), PAPER: ("chart-ring", 5), MEASURED: ("chart-dot", 4.5)}[series.kind]
        hint = f"<title>{escape(series.name)}: {value_x:g}, {value_y:.4g}</title>"
        marks.append(f'<circle class="{css}" cx="{x:.1f}" cy="{y:.1f}" r="{radius}">{hint}</circle>')
    return f'<g class="c{series.colour % len(LIGHT)}">{"".join(marks)}</g>'


def _legend_entry(series: Series, x: float, y: float) -> str:
    if series.kind == PLANNED:
        mark = f'<line class="chart-line" x1="{x}" x2="{x + 20}" y1="{y}" y2="{y}"/>'
    else:
        css = "chart-ring" if series.kind == PAPER else "chart-dot"
        mark = f'<circle class="{css}" cx="{x + 10}" cy="{y}" r="5"/>'
    text = f'<text class="chart-soft" x="{x + 27}" y="{y + 4}" font-size="12">{escape(series.name)}</text>'
    return f'<g class="c{series.colour % len(LIGHT)}">{mark}{text}</g>'
