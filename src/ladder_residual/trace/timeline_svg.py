"""The picture of the README: the same layers under several wirings, so that a faster one is shorter; waiting in red.

One SVG without scripts or fonts of its own; colours follow the reader's light or dark scheme.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from ..common.charts import round_step
from ..plan.schedule import COMM, is_communication
from .panel import WAITING, Panel, Span

WIDTH, NARROW, RIGHT = 960, 440, 16  # NARROW: for a phone
ROW, GAP, LINE = 34, 6, 20
LAYERS_SHOWN = 2  # a border between two layers is where the wirings differ

STYLE = """
.bg{fill:#ffffff}.ink{fill:#1f2328}.soft{fill:#59636e}.axis{stroke:#d1d9e0;stroke-width:1}
.attention{fill:#2f6feb}.mlp{fill:#1f9d8a}.comm{fill:#c98a1b}.waiting{fill:#d1242f}.on{fill:#ffffff}
text{font-family:system-ui,-apple-system,'Segoe UI',Helvetica,Arial,sans-serif;font-size:13px}
.title{font-size:15px;font-weight:600}.small{font-size:11px}
@media (prefers-color-scheme:dark){.bg{fill:#0d1117}.ink{fill:#f0f6fc}.soft{fill:#9198a1}.axis{stroke:#3d444d}
.attention{fill:#4184f3}.mlp{fill:#2aa793}.comm{fill:#d29922}.waiting{fill:#f0524d}}
"""

LEGEND = {"attention": "attention", "mlp": "MLP", "comm": "all-reduce", "waiting": "exposed: compute waits"}


def timeline_svg(panels: Sequence[Panel], subtitle: str = "", *, width: int = WIDTH) -> str:
    if not panels:
        raise ValueError("a timeline needs at least one wiring")
    canvas = _Canvas(panels, width)
    parts: list[str] = []
    top = 16.0
    if subtitle:
        parts.append(f'<text class="soft" x="16" y="{top + 10}">{escape(subtitle)}</text>')
        top += 26
    for panel in panels:
        drawn, height = canvas.panel(panel, top)
        parts += drawn
        top += height + 14
    parts += canvas.axis(top)
    top += 30
    drawn, height = canvas.legend(top)
    parts += drawn
    height += top
    label = "; ".join(f"{p.title}: {_time(p.layer_us)} per layer, {p.hidden_percent:.0f} % hidden" for p in panels)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img" '
        f'aria-label="{escape(label, quote=True)}"><style>{STYLE}</style><rect class="bg" width="{width}" height="{height}"/>'
        + "".join(parts)
        + "</svg>\n"
    )


class _Canvas:
    """Every panel shows the same layers, from the middle of the model: its ends are not typical."""

    def __init__(self, panels: Sequence[Panel], width: int) -> None:
        self.width, self.narrow = width, width < WIDTH
        self.left = 84 if self.narrow else 118
        self.first = min(max(span.layer for span in panel.spans) for panel in panels) // 2
        starts = [_layer_starts(panel) for panel in panels]
        self.count = next((n for n in range(LAYERS_SHOWN, 0, -1) if all(self.first + n in each for each in starts)), 1)
        self.reference = self.window(panels[0])  # the first panel is what the others are compared with
        self.longest = max(end - begin for begin, end in map(self.window, panels))
        self.scale = (width - self.left - RIGHT) / self.longest

    def window(self, panel: Panel) -> tuple[float, float]:
        starts = _layer_starts(panel)
        end = max(span.end for span in panel.spans)
        return starts.get(self.first, 0.0), starts.get(self.first + self.count, end)

    def panel(self, panel: Panel, top: float) -> tuple[list[str], float]:
        begin, end = self.window(panel)
        least = 1e-3 * self.longest  # what only touches the window would be a hair
        shown = [span for span in panel.spans if span.end > begin + least and span.start < end - least]
        rows = sorted(dict.fromkeys(span.row for span in shown), key=lambda row: (is_communication(row), row))
        gain = (self.reference[1] - self.reference[0]) / (end - begin)
        faster = f" ({gain:.2f}x)" if (begin, end) != self.reference else ""
        layers = f"{self.count} layer{'s' if self.count > 1 else ''}"
        facts = [
            f"{layers} in {_time(end - begin)}{faster}",
            f"{panel.hidden_percent:.0f} % of the communication hidden, {panel.label}",
        ]
        lines = facts if self.narrow else [", ".join(facts)]
        title = f'<tspan class="title ink">{escape(panel.title)}</tspan><tspan class="soft" dx="10">{escape(lines[0])}</tspan>'
        parts = [f'<text x="16" y="{top + 14}">{title}</text>']
        parts += [f'<text class="soft" x="16" y="{top + 14 + LINE}">{escape(line)}</text>' for line in lines[1:]]
        at = top + 4 + LINE * len(lines)
        for row in rows:
            name = row.replace(COMM, "all-reduce")
            parts.append(f'<text class="soft" x="16" y="{at + ROW / 2 + 5}">{escape(name)}</text>')
            parts.append(
                f'<line class="axis" x1="{self.left}" x2="{self.left + (end - begin) * self.scale:.1f}" y1="{at + ROW}" y2="{at + ROW}"/>'
            )
            parts += [_box(span, begin, end, self.scale, self.left, at) for span in shown if span.row == row]
            at += ROW + GAP
        return parts, at - top

    def axis(self, top: float) -> list[str]:
        step = round_step(self.longest / (4 if self.narrow else 8))
        parts = []
        for tick in range(int(self.longest / step) + 1):
            x = self.left + tick * step * self.scale
            label = f"{tick * step / 1e3:g} ms" if self.longest >= 5e3 else f"{tick * step:g} us"
            parts.append(f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{top - 8}" y2="{top - 2}"/>')
            parts.append(f'<text class="soft small" x="{x:.1f}" y="{top + 12}" text-anchor="middle">{label}</text>')
        return parts

    def legend(self, top: float) -> tuple[list[str], float]:
        parts, x, begin = [], float(self.left), top
        for kind, text in LEGEND.items():
            if x + 26 + 7.2 * len(text) > self.width:
                x, top = float(self.left), top + LINE
            parts.append(f'<rect class="{kind}" x="{x}" y="{top}" width="13" height="13" rx="3"/>')
            parts.append(f'<text class="soft" x="{x + 19}" y="{top + 11}">{text}</text>')
            x += 40 + 7.2 * len(text)
        return parts, top - begin + 26


def _layer_starts(panel: Panel) -> dict[int, float]:
    """When each layer's first module starts to compute."""
    starts: dict[int, float] = {}
    for span in panel.spans:
        if not is_communication(span.row) and span.name != WAITING:
            starts[span.layer] = min(span.start, starts.get(span.layer, math.inf))
    return starts


def _box(span: Span, begin: float, end: float, scale: float, edge: float, top: float) -> str:
    left = (max(begin, span.start) - begin) * scale
    width = (min(end, span.end) - begin) * scale - left
    if span.name == WAITING:
        kind = "waiting"
    elif is_communication(span.row):
        kind = "comm"
    else:
        kind = "mlp" if span.name == "MLP" else "attention"
    text = {"waiting": "waits", "comm": "all-reduce"}.get(kind, span.name)
    hint = f"<title>{escape(span.name)}, layer {span.layer}: {_time(span.end - span.start)}</title>"
    x, middle = edge + left, edge + left + width / 2
    shape = f'<rect class="{kind}" x="{x + 0.5:.2f}" y="{top}" width="{max(width - 1, 0.5):.2f}" height="{ROW - 4}" rx="3"/>'
    room = 6.4 * len(text)
    label = ""
    if width > room + 8:
        label = f'<text class="on" x="{middle:.1f}" y="{top + ROW / 2 + 3}" text-anchor="middle">{escape(text)}</text>'
    return f"<g>{hint}{shape}{label}</g>"


def _time(us: float) -> str:
    return f"{us / 1e3:.2f} ms" if us >= 1e3 else f"{us:.0f} us"
