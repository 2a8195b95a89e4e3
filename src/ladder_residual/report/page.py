"""``ladder report``: one self-contained HTML page (no network, no script), its charts also as files."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from .charts import Chart, chart_png, chart_svg
from .charts import style as chart_style
from .figures import all_charts, reference_case
from .points import repository_results
from .results import Results, Table, Timeline, read_results
from .timeline_svg import timeline_svg
from .trace import planned_panel
from .validate import Validation, validate

LABELS = {
    "planned": "computed by the cost model and the event simulator; no such machine was used",
    "emulated": "timed on one GPU that holds one rank's share; its all-reduce is a kernel that waits",
    "measured": "timed on real ranks",
    "paper": "a number of arXiv 2501.06589",
}

PAGE_STYLE = """
:root{color-scheme:light dark;--bg:#ffffff;--ink:#1f2328;--soft:#59636e;--line:#d1d9e0;--card:#f6f8fa;--accent:#2f6feb}
@media (prefers-color-scheme:dark){:root{--bg:#0d1117;--ink:#f0f6fc;
--soft:#9198a1;--line:#3d444d;--card:#151b23;--accent:#6ea8ff}}
*{box-sizing:border-box}body{margin:0;background:var(--bg);color:var(--ink);
font:16px/1.55 system-ui,-apple-system,'Segoe UI',Helvetica,Arial,sans-serif}
main{max-width:1120px;margin:0 auto;padding:24px 16px 64px}h1{font-size:1.7rem;line-height:1.2;margin:.2em 0}
h2{font-size:1.25rem;margin:2em 0 .5em;border-bottom:1px solid var(--line);padding-bottom:.25em}
h3{font-size:1rem;margin:1.4em 0 .4em}
p{margin:.5em 0}.quiet{color:var(--soft);font-size:.9rem;overflow-wrap:anywhere}
.charts{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,440px),1fr));gap:16px}
figure{margin:0;border:1px solid var(--line);border-radius:8px;padding:8px;background:var(--bg);min-width:0}
figure svg{display:block;width:100%;height:auto}figcaption{color:var(--soft);font-size:.85rem;padding:4px 6px}
.wide{overflow-x:auto;-webkit-overflow-scrolling:touch}.wide svg{min-width:640px}
table{border-collapse:collapse;font-size:.87rem;font-variant-numeric:tabular-nums;min-width:100%}
th,td{padding:5px 9px;border-bottom:1px solid var(--line);text-align:left;white-space:nowrap}th{background:var(--card)}
td.why{white-space:normal;min-width:22em}
.badge{display:inline-block;border:1px solid currentColor;border-radius:99px;padding:0 .6em;font-size:.75rem;
color:var(--accent)}
dl{display:grid;grid-template-columns:max-content 1fr;gap:4px 12px}dd{margin:0}a{color:var(--accent)}
"""


def build_report(results: Results, validation: Validation) -> str:
    charts = {chart.key: chart for chart in all_charts(results.quality, results.selections)}
    chosen = [key for key in charts if key.startswith("selection")]
    speed = [key for key in charts if key not in ("emulated", "converted", "quality", *chosen)]
    inside = sum(row["inside"] for row in validation.summary())
    sections = [
        "<h1>What a wiring gives, and how well we know it</h1>",
        "<p>Speed of tensor-parallel decoding when the all-reduces run beside the next module (ladder residual) instead of "
        "before it. Every number carries its origin:</p>",
        "<dl>" + "".join(f"<dt>{_badge(label)}</dt><dd>{escape(text)}</dd>" for label, text in LABELS.items()) + "</dl>",
        "<h2>The same two layers, side by side</h2>",
        _planned_timeline(),
        *(_timeline(one) for one in results.timelines),
        "<h2>Speed-up</h2>",
        "<p>Lines are planned, rings are the paper's numbers. Batch, ranks and size use the paper's engine profile; "
        "by link uses this project's. The constants behind the lines were fitted on some of the rings; what was checked "
        "is below.</p>",
        _figures([charts[key] for key in speed]),
        "<h2>Emulated rank</h2>",
        _figures([charts["emulated"]]),
        "<h2>How much of the model to convert</h2>",
        "<p>Speed-up and quality against the number of converted layers, counted from the top of the model.</p>",
        _figures([charts[key] for key in ("converted", "quality", *chosen)]),
        "<h2>Results</h2>",
        "".join(_table(table) for table in results.tables) or '<p class="quiet">No result files were given.</p>',
        "<h2>Is the plan right?</h2>",
        f"<p>{inside} of {len(validation.checked())} checked points are within their target. Points the constants were "
        "fitted on are not counted.</p>",
        _validation(validation),
        "<h2>Sources</h2>",
        "<ul><li>Paper: Ladder-Residual, arXiv 2501.06589 (ICML 2025), and its authors' plotting scripts.</li>"
        "<li>All-reduce latencies: measured and published by NVIDIA, ai-dynamo/aiconfigurator, Apache-2.0.</li>"
        "<li>Everything planned here: <code>ladder plan</code>; checked by <code>ladder plan validate</code>.</li></ul>",
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1"><title>Ladder residual: report</title>'
        # An empty icon keeps the browser from asking a server for one.
        f'<link rel="icon" href="data:,"><style>{PAGE_STYLE}{chart_style()}</style></head><body><main>'
        + "\n".join(sections)
        + "</main></body></html>\n"
    )


def write_report(
    paths: Sequence[str | Path], out: str | Path, plots: str | Path | None = None, *, png: bool = True
) -> list[Path]:
    """Write the page, and its charts as files if ``plots`` is a folder; returns what was written."""
    results = read_results(paths)
    page = Path(out)
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(build_report(results, validate(*repository_results())))
    written = [page]
    if plots is not None:
        folder = Path(plots)
        folder.mkdir(parents=True, exist_ok=True)
        for chart in all_charts(results.quality, results.selections):
            picture = folder / f"{chart.key}.svg"
            picture.write_text(chart_svg(chart))
            written.append(picture)
            if png:
                chart_png(chart, picture.with_suffix(".png"))
                written.append(picture.with_suffix(".png"))
    return written


def _badge(label: str) -> str:
    return f'<span class="badge">{escape(label)}</span>'


def _figures(charts: Sequence[Chart]) -> str:
    figures = []
    for chart in charts:
        caption = f"<figcaption>{escape(chart.note)}</figcaption>" if chart.note else ""
        figures.append(f'<figure id="{chart.key}">{chart_svg(chart, standalone=False)}{caption}</figure>')
    return f'<div class="charts">{"".join(figures)}</div>'


def _timeline(one: Timeline) -> str:
    drawn = f'<div class="wide">{timeline_svg(one.panels)}</div>'
    return f"<figure>{drawn}<figcaption>{_badge(one.label)} {escape(one.setting)}</figcaption></figure>"


def _planned_timeline() -> str:
    case = reference_case(link="nccl-no-p2p")
    panels = [planned_panel(case, wiring) for wiring in ("standard", "ladder")]
    caption = "Llama-3-70B, one of 8 H100 with P2P off, batch 1, one decode step in the middle of the model. Planned."
    return f'<figure><div class="wide">{timeline_svg(panels)}</div><figcaption>{caption}</figcaption></figure>'


def _table(table: Table) -> str:
    head = "".join(f"<th>{escape(column)}</th>" for column in table.columns)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in table.rows)
    return (
        f'<h3>{escape(table.title)} {_badge(table.label)}</h3><p class="quiet">{escape(table.source)}</p>'
        f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    )


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
    summary = _table(Table("Checked points", "paper", "ladder plan validate", columns, tuple(rows)))
    misses = [c for c in validation.comparisons if c.status in ("miss", "FAIL")]
    lines = "".join(
        f"<tr><td>{escape(c.point.name)}</td><td>{c.point.measured:.3f}</td><td>{c.predicted:.3f}</td>"
        f'<td>{c.error_percent:+.1f} %</td><td class="why">{escape(c.known_miss.why if c.known_miss else "")}</td></tr>'
        for c in misses
    )
    head = "<tr><th>outside its target</th><th>measured</th><th>planned</th><th>error</th><th>why</th></tr>"
    return f'{summary}<h3>Where the plan is wrong</h3><div class="wide"><table>{head}{lines}</table></div>'
