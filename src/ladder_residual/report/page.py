"""``ladder report``: one self-contained HTML page (no network, no script), its charts also as files."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from html import escape
from pathlib import Path

from ..common.charts import Chart, chart_svg
from ..common.charts import style as chart_style
from ..common.files import check_can_write, replace_text
from ..common.terminal import printable
from ..trace.timeline_svg import NARROW, timeline_svg
from .results import COMPARISON, OTHER, PLAN, QUALITY, VALIDATION, Results, Table, Timeline, files_of, read_results

LABELS = {
    "planned": "computed by the cost model and the event simulator; no such machine was used",
    "emulated": "timed on one GPU that holds one rank's shard; its all-reduce is a kernel that waits",
    "measured": "timed on real ranks",
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
figure+figure{margin-top:16px}.charts figure{margin:0}
figure svg{display:block;width:100%;height:auto}figcaption{color:var(--soft);font-size:.85rem;padding:4px 6px}
.wide{overflow-x:auto;-webkit-overflow-scrolling:touch}.narrow{display:none}
.summary{padding-left:1.2em;font-size:1.05rem}.summary li{margin:.35em 0}
.bars{display:grid;grid-template-columns:max-content 1fr max-content;gap:6px 10px;align-items:center;margin:.8em 0;
font-size:.9rem;font-variant-numeric:tabular-nums}.bars i{display:block;height:16px;border-radius:3px;background:var(--accent)}
table{border-collapse:collapse;font-size:.87rem;font-variant-numeric:tabular-nums;min-width:100%}
th,td{padding:5px 9px;border-bottom:1px solid var(--line);text-align:left;white-space:nowrap}th{background:var(--card)}
td.why{white-space:normal;min-width:22em}
.badge{display:inline-block;border:1px solid currentColor;border-radius:99px;padding:0 .6em;font-size:.75rem;
color:var(--accent)}
@media (max-width:640px){.charts text{font-size:15px}.narrow{display:block}.broad{display:none}thead{display:none}
tr{display:block;border:1px solid var(--line);border-radius:8px;margin:0 0 10px;padding:4px 0}
td,td.why{display:flex;justify-content:space-between;gap:16px;white-space:normal;min-width:0;text-align:right;border:0}
td::before{content:attr(data-label);color:var(--soft);text-align:left}td:empty{display:none}}
dl{display:grid;grid-template-columns:max-content 1fr;gap:4px 12px}dd{margin:0}a{color:var(--accent)}
"""


def write_report(
    paths: Sequence[str | Path], out: str | Path, plots: str | Path | None = None, *, validation: bool = False
) -> list[Path]:
    """Write the page of these results, and its charts as files if ``plots`` is a folder; returns what was written.
    ``validation`` adds the planner's prediction of each emulated step."""
    if not paths:
        raise ValueError("give the results to show: JSON files or folders of them, such as results/")
    for file in (Path(out), *([Path(plots, "charts.svg")] if plots is not None else [])):
        check_can_write(file)
    results = read_results(paths, validation=validation)
    try:
        page = build_report(results)
    except MemoryError:
        raise
    except Exception as error:  # numbers that cannot be drawn
        raise ValueError(f"{_undrawable(paths)} cannot be drawn: {type(error).__name__}: {str(error)[:200]}") from error
    return write_page(page, results.charts, out, plots)


def _undrawable(paths: Sequence[str | Path]) -> str:
    for file in files_of(paths):
        try:
            build_report(read_results([file]))
        except Exception:
            return str(file)
    return "the results together"


def build_report(results: Results) -> str:
    sections = ["<h1>Results</h1>"]
    if results.summary:
        sections.append(f'<ul class="summary">{"".join(f"<li>{escape(line)}</li>" for line in results.summary)}</ul>')
    for name in (COMPARISON, QUALITY):
        sections += tables(name, results)
    if results.charts:
        about = "<p>Lines are planned or measured curves, dots were measured or emulated.</p>"
        sections += ["<h2>Curves</h2>", about, figures(results.charts)]
    if results.timelines:
        sections += ["<h2>Timelines</h2>", *map(timeline, results.timelines)]
    for name in (OTHER, PLAN, VALIDATION):
        sections += tables(name, results)
    sections += ["<h2>Where numbers come from</h2>", legend(LABELS)]
    return html_page("Ladder residual: results", sections)


def tables(section: str, results: Results) -> list[str]:
    found = [table(one) for one in results.tables if one.section == section]
    return [f"<h2>{escape(section)}</h2>", *found] if found else []


def html_page(title: str, sections: Iterable[str]) -> str:
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width,initial-scale=1"><title>{escape(title)}</title>'
        # An empty icon keeps the browser from asking a server for one.
        f'<link rel="icon" href="data:,"><style>{PAGE_STYLE}{chart_style()}</style></head><body><main>'
        + "\n".join(sections)
        + "</main></body></html>\n"
    )


def write_page(text: str, charts: Iterable[Chart], out: str | Path, plots: str | Path | None) -> list[Path]:
    page = Path(out)
    page.parent.mkdir(parents=True, exist_ok=True)
    replace_text(page, printable(text))  # XML has no place for control characters
    written = [page]
    if plots is not None:
        Path(plots).mkdir(parents=True, exist_ok=True)
        for chart in charts:
            written.append(Path(plots) / f"{chart.key}.svg")
            replace_text(written[-1], printable(chart_svg(chart)))
    return written


def badge(label: str) -> str:
    return f'<span class="badge">{escape(label)}</span>'


def legend(labels: dict[str, str]) -> str:
    return "<dl>" + "".join(f"<dt>{badge(label)}</dt><dd>{escape(text)}</dd>" for label, text in labels.items()) + "</dl>"


def figures(charts: Iterable[Chart]) -> str:
    drawn = []
    for chart in charts:
        caption = f"<figcaption>{escape(chart.note)}</figcaption>" if chart.note else ""
        drawn.append(f'<figure id="{escape(chart.key)}">{chart_svg(chart, standalone=False)}{caption}</figure>')
    return f'<div class="charts">{"".join(drawn)}</div>'


def timeline(one: Timeline) -> str:
    """Drawn twice: in full, and narrow for a phone."""
    drawn = (
        f'<div class="broad">{timeline_svg(one.panels)}</div><div class="narrow">{timeline_svg(one.panels, width=NARROW)}</div>'
    )
    return f"<figure>{drawn}<figcaption>{badge(one.label)} {escape(one.setting)}</figcaption></figure>"


def table(one: Table) -> str:
    one = _without_constants(one)
    head = "".join(f"<th>{escape(column)}</th>" for column in one.columns)
    body = "".join(f"<tr>{''.join(map(_cell, one.columns, row))}</tr>" for row in one.rows)
    return (
        f'<h3>{escape(one.title)} {badge(one.label)}</h3><p class="quiet">{escape(one.source)}</p>{_bars(one) if one.bars else ""}'
        f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    )


def _without_constants(one: Table) -> Table:
    """What is alike in every one of many rows is said once, above the table."""
    constant = [k for k in range(1, len(one.columns)) if len({row[k] for row in one.rows}) == 1] if len(one.rows) > 4 else []
    if not constant:
        return one
    kept = [k for k in range(len(one.columns)) if k not in constant]
    said = ", ".join(f"{one.columns[k]} {one.rows[0][k]}" for k in constant if one.rows[0][k])
    rows = tuple(tuple(row[k] for k in kept) for row in one.rows)
    source = "; ".join(part for part in (one.source, said) if part)
    return replace(one, source=source, columns=tuple(one.columns[k] for k in kept), rows=rows)


def _cell(column: str, text: str) -> str:
    """A phone shows the column's name beside each cell."""
    return f'<td data-label="{escape(column, quote=True)}">{escape(text)}</td>'


def _bars(one: Table) -> str:
    longest = max(value for _, value, _ in one.bars) or 1.0
    rows = (
        f'<span>{escape(name)}</span><i style="width:{100 * value / longest:.1f}%"></i><b>{escape(text)}</b>'
        for name, value, text in one.bars
    )
    return f'<div class="bars">{"".join(rows)}</div>'
