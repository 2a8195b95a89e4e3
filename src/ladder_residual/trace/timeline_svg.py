"""The picture of the README: compute and communication of the same layers under several wirings, waiting in red.

One SVG without scripts or fonts of its own; colours follow the reader's light or dark scheme.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from .schedule import COMM, LANE, is_communication
from .trace import WAITING, Panel, Span

WIDTH, LEFT, RIGHT = 960, 118, 16
ROW, GAP, HEAD = 34, 6, 44
LAYERS_SHOWN = 2.0  # of the slowest wiring: a border between two layers is where the wirings differ

STYLE = """
.bg{fill:#ffffff}.ink{fill:#1f2328}.soft{fill:#59636e}.axis{stroke:#d1d9e0;stroke-width:1}
.attention{fill:#2f6feb}.mlp{fill:#1f9d8a}.comm{fill:#c98a1b}.waiting{fill:#d1242f}.on{fill:#ffffff}
text{font-family:system-ui,-apple-system,'Segoe UI',Helvetica,Arial,sans-serif;font-size:13px}
.title{font-size:15px;font-weight:600}.small{font-size:11px}
@media (prefers-color-scheme:dark){.bg{fill:#0d1117}.ink{fill:#f0f6fc}.soft{fill:#9198a1}.axis{stroke:#3d444d}
.attention{fill:#4184f3}.mlp{fill:#2aa793}.comm{fill:#d29922}.waiting{fill:#f0524d}}
"""


def timeline_svg(panels: Sequence[Panel], subtitle: str = "") -> str:
    if not panels:
        raise ValueError("a timeline needs at least one wiring")
    window = LAYERS_SHOWN * max(panel.layer_us for panel in panels)
    scale = (WIDTH - LEFT - RIGHT) / window
    parts: list[str] = []
    top = 16.0
    if subtitle:
        parts.append(f'<text class="soft" x="16" y="{top + 10}">{escape(subtitle)}</text>')
        top += 26
    for panel in panels:
        drawn, height = _panel(panel, top, window, scale)
        parts += drawn
        top += height + 14
    parts += _axis(top, window, scale)
    top += 30
    parts += _legend(top)
    height = top + 26
    label = "; ".join(f"{p.title}: {_time(p.layer_us)} per layer, {p.hidden_percent:.0f} % hidden" for p in panels)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" role="img" '
        f'aria-label="{escape(label, quote=True)}"><style>{STYLE}</style><rect class="bg" width="{WIDTH}" height="{height}"/>'
        + "".join(parts)
        + "</svg>\n"
    )


def _panel(panel: Panel, top: float, window: float, scale: float) -> tuple[list[str], float]:
    begin = _window_start(panel)
    shown = [span for span in panel.spans if span.end > begin and span.start < begin + window]
    rows = sorted(dict.fromkeys(span.row for span in shown), key=lambda row: (is_communication(row), row))
    facts = f"{_time(panel.layer_us)} per layer, {panel.hidden_percent:.0f} % of the communication hidden ({panel.label})"
    parts = [
        f'<text x="16" y="{top + 14}"><tspan class="title ink">{escape(panel.title)}</tspan>'
        f'<tspan class="soft" dx="10">{escape(facts)}</tspan></text>'
    ]
    at = top + HEAD - 20
    for row in rows:
        name = {LANE: "lane 2"}.get(row, row.replace(COMM, "all-reduce"))
        parts.append(f'<text class="soft" x="16" y="{at + ROW / 2 + 5}">{name}</text>')
        parts.append(f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at + ROW}" y2="{at + ROW}"/>')
        parts += [_box(span, begin, window, scale, at) for span in shown if span.row == row]
        at += ROW + GAP
    return parts, at - top


def _window_start(panel: Panel) -> float:
    """Start of the attention of the middle layer: the ends of the model are not typical."""
    middle = max(span.layer for span in panel.spans) // 2
    starts = [s.start for s in panel.spans if s.layer == middle and not is_communication(s.row) and s.name != WAITING]
    return min(starts, default=0.0)


def _box(span: Span, begin: float, window: float, scale: float, top: float) -> str:
    left = max(0.0, span.start - begin) * scale
    width = (min(window, span.end - begin)) * scale - left
    kind = (
        "waiting"
        if span.name == WAITING
        else "comm"
        if is_communication(span.row)
        else "mlp"
        if span.name == "MLP"
        else "attention"
    )
    text = {"waiting": "waits", "comm": "all-reduce"}.get(kind, span.name)
    hint = f"<title>{escape(span.name)}, layer {span.layer}: {_time(span.end - span.start)}</title>"
    x, middle = LEFT + left, LEFT + left + width / 2
    shape = f'<rect class="{kind}" x="{x + 0.5:.2f}" y="{top}" width="{max(width - 1, 0.5):.2f}" height="{ROW - 4}" rx="3"/>'
    room = 6.4 * len(text)
    label = ""
    if width > room + 8:
        label = f'<text class="on" x="{middle:.1f}" y="{top + ROW / 2 + 3}" text-anchor="middle">{escape(text)}</text>'
    return f"<g>{hint}{shape}{label}</g>"


def _axis(top: float, window: float, scale: float) -> list[str]:
    step = _round_step(window / 8)
    parts = []
    for tick in range(int(window / step) + 1):
        x = LEFT + tick * step * scale
        label = f"{tick * step / 1e3:g} ms" if window >= 5e3 else f"{tick * step:g} us"
        parts.append(f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{top - 8}" y2="{top - 2}"/>')
        parts.append(f'<text class="soft small" x="{x:.1f}" y="{top + 12}" text-anchor="middle">{label}</text>')
    return parts


def _time(us: float) -> str:
    return f"{us / 1e3:.2f} ms" if us >= 1e3 else f"{us:.0f} us"


def _round_step(about: float) -> float:
    power = 10 ** math.floor(math.log10(about))
    return next(power * m for m in (1, 2, 5, 10) if power * m >= about)


def _legend(top: float) -> list[str]:
    parts, x = [], float(LEFT)
    for kind, text in (
        ("attention", "attention"),
        ("mlp", "MLP"),
        ("comm", "all-reduce"),
        ("waiting", "exposed: compute waits"),
    ):
        parts.append(f'<rect class="{kind}" x="{x}" y="{top}" width="13" height="13" rx="3"/>')
        parts.append(f'<text class="soft" x="{x + 19}" y="{top + 11}">{text}</text>')
        x += 40 + 7.2 * len(text)
    return parts
