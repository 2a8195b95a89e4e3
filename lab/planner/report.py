"""The planner's validation as one HTML page: what a wiring gives, and how well we know it."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from lab.planner.figures import all_charts, reference_case
from lab.planner.points import repository_results
from lab.planner.validate import Validation, validate
from ladder_residual.common.charts import Chart
from ladder_residual.report.page import LABELS, figures, html_page, legend, table, timeline, write_page
from ladder_residual.report.results import Table, Timeline
from ladder_residual.trace.panel import planned_panel


def write_validation_page(out: str | Path, plots: str | Path | None = None) -> list[Path]:
    charts = all_charts()
    return write_page(validation_page(validate(*repository_results()), charts), charts, out, plots)


def validation_page(validation: Validation, drawn: Sequence[Chart]) -> str:
    charts = {chart.key: chart for chart in drawn}
    layers, emulated = ("converted", "quality"), ("emulated",)
    speed = [chart for key, chart in charts.items() if key not in layers + emulated]
    inside = sum(row["inside"] for row in validation.summary())
    case = reference_case(link="nccl-no-p2p")
    planned = Timeline(
        tuple(planned_panel(case, wiring) for wiring in ("standard", "ladder")),
        "Llama-3-70B, one of 8 H100 with P2P off, batch 1, one decode step in the middle of the model.",
        "planned",
    )
    sections = [
        "<h1>What a wiring gives, and how well we know it</h1>",
        "<p>Speed of tensor-parallel decoding when the all-reduces run beside the next module (ladder residual) instead of "
        "before it. Every number carries its origin:</p>",
        legend({**LABELS, "paper": "a number of arXiv 2501.06589"}),
        "<h2>The same two layers, side by side</h2>",
        timeline(planned),
        "<h2>Speed-up</h2>",
        "<p>Lines are planned, rings are the paper's numbers. Batch, ranks and size use the paper's engine profile; "
        "by link uses this project's. The constants behind the lines were fitted on some of the rings; what was checked "
        "is below.</p>",
        figures(speed),
        "<h2>Emulated rank</h2>",
        figures(charts[key] for key in emulated),
        "<h2>How much of the model to convert</h2>",
        "<p>Speed-up and quality against the number of converted layers, counted from the top of the model.</p>",
        figures(charts[key] for key in layers),
        "<h2>Is the plan right?</h2>",
        f"<p>{inside} of {len(validation.checked())} checked points are within their target. Points the constants were "
        "fitted on are not counted.</p>",
        _validation(validation),
        "<h2>Sources</h2>",
        "<ul><li>Paper: Ladder-Residual, arXiv 2501.06589 (ICML 2025), and its authors' plotting scripts.</li>"
        "<li>All-reduce latencies: measured and published by NVIDIA, ai-dynamo/aiconfigurator, Apache-2.0.</li>"
        "<li>Everything planned here: <code>ladder plan</code>; checked by <code>python -m lab.planner validate</code>.</li></ul>",
    ]
    return html_page("Ladder residual: the planner", sections)


def _validation(validation: Validation) -> str:
    rows = [
        (
            line["target"],
            f"{line['target_percent']:.0f} %",
            f"{line['inside']} of {line['checked']}",
            f"{line['worst_percent']:+.1f} %",
            line["worst_point"],
        )
        for line in validation.summary()
    ]
    columns = ("checked against", "target", "within", "worst error", "where")
    summary = table(Table("Checked points", "paper", "python -m lab.planner validate", columns, tuple(rows)))
    lines = "".join(
        f"<tr><td>{escape(c.point.name)}</td><td>{c.point.measured:.3f}</td><td>{c.predicted:.3f}</td>"
        f'<td>{c.error_percent:+.1f} %</td><td class="why">{escape(c.known_miss.why if c.known_miss else "")}</td></tr>'
        for c in validation.misses()
    )
    head = "<tr><th>outside its target</th><th>measured</th><th>planned</th><th>error</th><th>why</th></tr>"
    return f'{summary}<h3>Where the plan is wrong</h3><div class="wide"><table>{head}{lines}</table></div>'
