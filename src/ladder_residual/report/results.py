"""Result files: read, told apart, and turned into tables, charts and timelines. A file says itself what it is."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from ..adapt.auto import FILE as SELECTION_FILE
from ..adapt.outcome import FILE as ADAPT
from ..adapt.selection_chart import selection_chart
from ..common.charts import Chart
from ..evaluate.markdown import is_share, percent
from ..models.adapter import ADAPTER_CONFIG
from ..models.checkpoint_reader import CONFIG
from ..plan.hardware import shipped
from ..plan.points import emulated_rank_points
from ..trace.panel import Panel, read_trace
from .figures import hybrid_chart, quality_chart, recovery_chart, step_chart
from .words import cell, facts_of, heading, readable

# Sections of the page, in order; the last only on request.
COMPARISON, QUALITY, PLAN = "Comparison", "Quality", "Plan"
OTHER, VALIDATION = "Other measurements", "How well the plan predicts"
FIRST_RANK = ", rank 0"  # at the end of the title of a recorded panel


@dataclass(frozen=True)
class Table:
    title: str
    label: str  # planned, emulated, measured or paper: shown as a badge
    source: str  # where the numbers come from, and how to get them again
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    section: str = OTHER
    bars: tuple[tuple[str, float, str], ...] = ()  # drawn above it: a name, a number, and the number as text


@dataclass(frozen=True)
class Timeline:
    """A trace of `ladder trace`: the panels to draw, and what they show."""

    panels: tuple[Panel, ...]
    setting: str
    label: str


@dataclass
class Results:
    validation: bool = False  # show the planner's prediction beside what was emulated
    sentences: list[tuple[str, str]] = field(default_factory=list)  # (section, what a result says)
    tables: list[Table] = field(default_factory=list)
    charts: list[Chart] = field(default_factory=list)
    timelines: list[Timeline] = field(default_factory=list)
    quality: list[Mapping[str, Any]] = field(default_factory=list)  # drawn in one chart
    evaluations: list[Mapping[str, Any]] = field(default_factory=list)  # one table

    @property
    def summary(self) -> list[str]:
        """First on the page: what was measured, then what is planned."""
        return [said for place in (COMPARISON, QUALITY, PLAN) for section, said in self.sentences if section == place]


def files_of(paths: Iterable[str | Path]) -> list[Path]:
    """Directories mean the JSON files under them; a checkpoint means what `ladder adapt` and `convert --wiring auto` left in it."""
    files: list[Path] = []
    for path in map(Path, paths):
        found = sorted(path.rglob("*.json")) if path.is_dir() else [path]
        if any((path / name).is_file() for name in (CONFIG, ADAPTER_CONFIG)):
            found = [file for file in found if file.name in (ADAPT, SELECTION_FILE)]
        if not found:
            raise ValueError(f"{path} holds no JSON results")
        files += found
    return files


def read_results(paths: Iterable[str | Path], *, validation: bool = False) -> Results:
    results = Results(validation)
    for file in files_of(paths):
        document = _load(file)
        kinds = [kind for kind in KINDS if kind.matches(document)]
        if not kinds:
            raise ValueError(
                f"{file} is no result this page knows: it has {', '.join(key[:40] for key in list(document)[:8]) or 'no fields'}; "
                f"expected a {', a '.join(kind.what for kind in KINDS)}"
            )
        # A recovery run may hold the selection of its layers beside its own rows.
        for kind in kinds if kinds[0].what == SELECTION else kinds[:1]:
            try:
                kind.read(results, document, file)
            except MemoryError:
                raise
            except Exception as error:  # a file may hold anything: other types, numbers beyond floats, layers within layers
                raise ValueError(f"{file} is no {kind.what} that can be shown; missing or wrong: {str(error)[:200]}") from error
    if results.quality:
        results.charts.append(quality_chart(results.quality))
    if results.evaluations:
        _add_evaluations(results)
    return results


def _load(file: Path) -> dict[str, Any]:
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"cannot read {file}: {error.strerror or error}; give JSON results, or folders of them") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not a readable JSON result: {error}") from error
    if not isinstance(document, dict):
        raise ValueError(f"{file} must hold a JSON object, found {type(document).__name__}")
    return document


def _table(
    title: str, label: str, source: str, rows: Sequence[Mapping[str, str]], section: str, bars: tuple[Any, ...] = ()
) -> Table:
    """From rows that name their columns."""
    columns = tuple(rows[0]) if rows else ()
    return Table(title, label, source, columns, tuple(tuple(row.values()) for row in rows), section, bars)


def _read_trace(results: Results, document: Mapping[str, Any], file: Path) -> None:
    panels, about = read_trace(document), document["otherData"]
    # Of a recorded run every rank has its panels; the first rank's are drawn.
    first = [replace(p, title=p.title.removesuffix(FIRST_RANK)) for p in panels if p.title.endswith(FIRST_RANK)]
    results.timelines.append(Timeline(tuple(first or panels), str(about["setting"]), str(about["label"])))


def _read_quality(results: Results, document: Mapping[str, Any], file: Path) -> None:
    if not document["quality"]:
        raise ValueError("it has no points")
    quality_chart([document])
    results.quality.append({"name": file.stem, **document})


def _read_selection(results: Results, document: Mapping[str, Any], file: Path) -> None:
    name = str(document.get("model") or file.parent.name).partition(" (")[0]
    title, key = f"{name}: loss by converted layers", _key(results, "selection", file)
    results.charts.append(selection_chart(document.get("selection", document), key=key, title=title))


def _read_tasks(results: Results, document: Mapping[str, Any], file: Path) -> None:
    """Accuracies in per cent with their standard errors: a row for each model."""
    tasks = tuple(next(iter(document["models"].values())))
    rows = tuple(
        (name, *(f"{100 * scores[task]['value']:.1f} ± {100 * scores[task]['stderr']:.1f}" for task in tasks))
        for name, scores in document["models"].items()
    )
    columns = ("model", *map(readable, tasks))
    results.tables.append(Table(f"Tasks: {file.parent.name}", "measured", str(document["tasks"]), columns, rows, QUALITY))


def _read_evaluation(results: Results, document: Mapping[str, Any], file: Path) -> None:
    shown = [row for row in document["rows"] if row.get("shown", True)]
    found = {str(row["task"]): (float(row["value"]), _optional(row.get("stderr")), str(row["metric"])) for row in shown}
    perplexity = document.get("perplexity")
    if not found and not perplexity:
        raise ValueError("it has neither a task nor a perplexity")
    measured = {"name": str(document.get("model") or file.stem), "tasks": found, "wiring": str(document.get("wiring", ""))}
    results.evaluations.append(
        measured | {"ppl": float(perplexity["ppl"]) if perplexity else None, "facts": facts_of({**document, "model": None})}
    )


def _optional(number: Any) -> float | None:
    return None if number is None else float(number)


def _add_evaluations(results: Results) -> None:
    """Every evaluation in one table, a column each; the first is what the others are compared with."""
    evaluations = results.evaluations
    first = evaluations[0]
    perplexities = [(one["name"], one["ppl"]) for one in evaluations if one["ppl"]]
    rows = [("perplexity", *("" if one["ppl"] is None else f"{one['ppl']:.2f}" for one in evaluations))] if perplexities else []
    for task, metric in {task: found[2] for one in evaluations for task, found in one["tasks"].items()}.items():
        scores = (percent(*one["tasks"][task]) if task in one["tasks"] else "" for one in evaluations)
        rows.append((readable(task) + (", %" if is_share(metric) else ""), *scores))
    if first["ppl"]:
        for name, ppl in perplexities[1:]:
            said = f"{name}: perplexity {ppl:.2f} against {first['ppl']:.2f} of {first['name']}."
            results.sentences.append((QUALITY, said))
    columns = ("score", *(f"{one['name']} ({one['wiring']})" if one["wiring"] else one["name"] for one in evaluations))
    bars = tuple((name, ppl, f"perplexity {ppl:.2f}") for name, ppl in perplexities)
    if bars and max(ppl for _, ppl in perplexities) >= 10 * min(ppl for _, ppl in perplexities):
        bars = ()  # all but one would be a dot
    source = f"ladder eval; {first['facts']}"
    results.tables.append(Table("Perplexity and tasks", "measured", source, columns, tuple(rows), QUALITY, bars))


def _read_recovery(results: Results, document: Mapping[str, Any], file: Path) -> None:
    """``adapt.json`` of a recovered checkpoint: the held-out losses before and after, and what was left of the gap."""
    name = str(document["student"])
    rows = []
    for text, found in document["texts"].items():
        losses = ["" if found.get(key) is None else f"{found[key]:.4f}" for key in ("before", "after", "teacher")]
        gap = found.get("gap_closed_percent")
        rows.append((text, *losses, "" if gap is None else f"{gap:.0f} %"))
        closed = "" if gap is None else f", {gap:.0f} % of the gap to the teacher closed"
        before, after, _ = losses
        said = f"{name}, recovery on {text}: held-out loss {f'from {before} ' if before else ''}to {after}{closed}."
        results.sentences.append((QUALITY, said))
    columns = ("held-out text", "loss before", "loss after", "loss of the teacher", "gap closed")
    share = f"{document['share_of_text_percent']:.0f} % of the text"
    source = f"ladder adapt; {document['tokens']:,} tokens in {document['steps']:,} steps, {share}"
    results.tables.append(Table(f"Recovery: {name}", "measured", source, columns, tuple(rows), QUALITY))
    if document.get("curve"):
        results.charts.append(recovery_chart(_key(results, "recovery", file), name, document))


def _read_plan(results: Results, document: Mapping[str, Any], file: Path) -> None:
    rows = []
    for row in document["rows"]:
        gains = row["speedup"]
        best = max((name for name in gains if name.startswith("ladder")), key=lambda name: gains[name])
        rows.append(
            {
                "model": f"{row.get('model', '')} on {row.get('device', '')}",
                "tp": str(row["tp"]),
                "link": row["link"],
                "batch": str(row["batch"]),
                "standard, tokens/s": f"{row['tokens_per_second']['standard']:.1f}",
                "GB per rank": f"{row['memory_total_gb']:.1f}",
                "ladder": f"{gains['ladder']:.2f}x",
                "best ladder": f"{gains[best]:.2f}x ({best})",
                "parallel": f"{gains['parallel']:.2f}x",
                "no communication": f"{gains['no-comm']:.2f}x",
            }
        )
        if row.get("advice"):
            results.sentences.append((PLAN, f"Planned: {row['advice']}"))
    results.tables.append(_table(f"Plan: {file.stem}", "planned", "ladder plan --json", rows, PLAN))
    if hybrid := [row for row in document["rows"] if row.get("hybrid")]:
        results.charts.append(hybrid_chart(_key(results, "hybrid", file), hybrid))


def _read_overlap(results: Results, document: Mapping[str, Any], file: Path) -> None:
    rows = [
        {
            "wiring": readable(row["wiring"]),
            "ms per step, median": f"{row['median_ms']:.2f}",
            "quartiles": f"{row['p25_ms']:.2f} to {row['p75_ms']:.2f}" if "p25_ms" in row else "",
            "speed-up": f"{row['speedup']:.2f}x" if "speedup" in row else "",
            "communication hidden": f"{row['hidden_percent']:.0f} %" if row.get("hidden_percent") is not None else "",
        }
        for row in document["rows"]
    ]
    where = f"tp {document['tp']}, batch {document['batch']}, {document['link']}"
    title = f"{document.get('model', 'Decode steps')}: {where}"
    steps = tuple((readable(row["wiring"]), float(row["median_ms"]), f"{row['median_ms']:.1f} ms") for row in document["rows"])
    results.tables.append(_table(title, "measured", f"ladder bench overlap; {facts_of(document)}", rows, COMPARISON, steps))
    converted = [row for row in document["rows"] if row["wiring"] not in ("standard", "no-comm") and row.get("speedup")]
    if converted:
        best = max(converted, key=lambda row: row["speedup"])
        hidden = best.get("hidden_percent")
        share = f", {hidden:.0f} % of the communication hidden" if hidden is not None else ""
        step = f"{best['median_ms']:.1f} ms a step{share}"
        said = f"Measured, {where}: {best['wiring']} decodes {best['speedup']:.2f}x as fast as standard ({step})."
        results.sentences.append((COMPARISON, said))


def _read_emulated(results: Results, document: Mapping[str, Any], file: Path) -> None:
    """Steps of an emulated rank: a table, and a chart for each batch that was timed over several links; the plan of each for validation."""
    rows, checked, points = [], [], emulated_rank_points(document, "engine", shipped())
    standard = {(p.group, p.batch, p.link): p.measured for p in points if p.wiring == "standard"}
    for point in points:
        gain = standard.get((point.group, point.batch, point.link), 0.0) / point.measured
        where = {"wiring": point.wiring, "batch": str(point.batch), "all-reduce": point.link, "engine": point.group}
        measured, planned = f"{point.measured:.2f}", point.predicted()
        rows.append({**where, "ms per step": measured, "speed-up": f"{gain:.2f}x" if gain else ""})
        # A point that constants were fitted on agrees by construction, so no error is shown.
        error = f"{100 * (planned / point.measured - 1):+.1f} %" if point.role == "check" else "fitted on it"
        checked.append({**where, "emulated, ms": measured, "planned, ms": f"{planned:.2f}", "error of the plan": error})
    title = f"Emulated rank: {file.stem}"
    source = str(document.get("source") or f"ladder bench decode; {facts_of(document)}")
    results.tables.append(_table(title, "emulated", source, rows, COMPARISON))
    if results.validation:
        results.tables.append(_table(title, "emulated", source, checked, VALIDATION))
    for group, batch in dict.fromkeys((point.group, point.batch) for point in points):
        mine = [point for point in points if (point.group, point.batch) == (group, batch)]
        if len({point.link for point in mine}) > 1:
            title = f"{group}, tp {mine[0].tp}, batch {batch}"
            results.charts.append(step_chart(_key(results, "steps", file), title, mine, planned=results.validation))


def _read_rows(results: Results, document: Mapping[str, Any], file: Path) -> None:
    """Any other list of rows: every scalar column, under a readable name."""
    rows = _rows(document)
    columns = tuple(dict.fromkeys(k for row in rows for k, v in row.items() if isinstance(v, str | int | float | type(None))))
    cells = tuple(tuple(cell(row.get(column)) for column in columns) for row in rows)
    emulated = document["emulated"] if "emulated" in document else "emulated" in json.dumps(document)[:4000]
    label = "emulated" if emulated else "measured"
    title = f"{readable(str(document.get('benchmark', 'Results')))}: {file.stem}"
    results.tables.append(Table(title, label, facts_of(document), tuple(map(heading, columns)), cells))


def _read_parts(results: Results, document: Mapping[str, Any], file: Path) -> None:
    """Several measurements of one run, each with rows of its own, or with what each of its models counted."""
    rows = []
    for name, part in document["parts"].items():
        rows += [{"part": name, **row} for row in part["rows"]]
        rows += [{"part": name, "model": model, **counts} for model, counts in part.get("tokens", {}).items()]
    _read_rows(results, {**document, **document.get("environment", {}), "rows": rows}, file)


def _rows(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    for key in ("rows", "results", "runs"):
        rows = document.get(key)
        if isinstance(rows, dict) and all(isinstance(row, dict) for row in rows.values()):
            rows = [{"name": name, **row} for name, row in rows.items()]
        if isinstance(rows, list) and rows and all(isinstance(row, dict) for row in rows):
            return rows
    return []


def _key(results: Results, kind: str, file: Path) -> str:
    """A file name of its own for a chart."""
    return f"{kind}-{file.stem}-{len(results.charts)}"


class Kind(NamedTuple):
    what: str
    matches: Callable[[Mapping[str, Any]], Any]
    read: Callable[[Results, Mapping[str, Any], Path], None]


SELECTION = "selection of `ladder convert --wiring auto`"
KINDS = (
    Kind(SELECTION, lambda d: "selection" in d or "curves" in d, _read_selection),
    Kind("trace of `ladder trace`", lambda d: "traceEvents" in d, _read_trace),
    Kind("result of `ladder adapt`", lambda d: d.get("kind") == "adapt", _read_recovery),
    Kind(
        "result of `ladder eval --out`",
        lambda d: str(d.get("format", "")).startswith("ladder-residual evaluation"),
        _read_evaluation,
    ),
    Kind("plan of `ladder plan --json`", lambda d: d.get("kind") == "plan", _read_plan),
    Kind("result of `ladder bench overlap`", lambda d: d.get("benchmark") == "overlap", _read_overlap),
    Kind("list of converted_layers and value under `quality`", lambda d: "quality" in d, _read_quality),
    Kind("table of `ladder eval`", lambda d: "models" in d and "tasks" in d, _read_tasks),
    Kind(
        "result of `ladder bench decode` on an emulated rank",
        lambda d: "points" in d or (d.get("benchmark") == "decode" and d.get("emulated")),
        _read_emulated,
    ),
    Kind("run of several parts", lambda d: isinstance(d.get("parts"), dict), _read_parts),
    Kind("list of rows", _rows, _read_rows),
)
