"""Result files for the report: read, told apart, and turned into tables. What a file is, it says itself."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .hardware import shipped
from .points import result_points
from .selection_chart import selection_chart
from .trace import Panel, read_trace

FIRST_RANK = ", rank 0"  # at the end of the title of a recorded panel


@dataclass(frozen=True)
class Table:
    title: str
    label: str  # planned, emulated, measured or paper: shown as a badge
    source: str  # where the numbers come from, and how to get them again
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Timeline:
    """A trace of `ladder trace`: the panels to draw, and what they show."""

    panels: tuple[Panel, ...]
    setting: str
    label: str


@dataclass(frozen=True)
class Results:
    tables: tuple[Table, ...]
    quality: tuple[Mapping[str, Any], ...]
    timelines: tuple[Timeline, ...] = ()
    selections: tuple[Mapping[str, Any], ...] = ()  # curves of `ladder convert --wiring auto`, with a name


def read_results(paths: Iterable[str | Path]) -> Results:
    """Directories mean the JSON files under them."""
    files: list[Path] = []
    for path in map(Path, paths):
        found = sorted(path.rglob("*.json")) if path.is_dir() else [path]
        if not found:
            raise ValueError(f"{path} holds no JSON results")
        files += found
    tables: list[Table] = []
    quality: list[Mapping[str, Any]] = []
    timelines: list[Timeline] = []
    selections: list[Mapping[str, Any]] = []
    for file in files:
        document = _load(file)
        if "selection" in document:  # a healing run that chose its layers first
            selections.append(_selection(document["selection"], document, file))
        if "traceEvents" in document:
            timelines.append(_timeline(document, file))
        elif document.get("kind") == "plan":
            tables.append(_plan_table(document, file))
        elif document.get("benchmark") == "overlap":
            tables.append(_overlap_table(document, file))
        elif "quality" in document:
            quality.append({"name": file.stem, **document})
            _check_quality(document, file)
        elif "curves" in document:
            selections.append(_selection(document, document, file))
        elif "models" in document and "tasks" in document:
            tables.append(_tasks_table(document, file))
        elif "points" in document or (document.get("benchmark") == "decode" and document.get("emulated")):
            tables.append(_emulated_table(document, file))
        elif _list_of_rows(document) is not None:
            tables.append(_plain_table(document, file))
        else:
            raise ValueError(
                f"{file} is no result this page knows: it has {', '.join(list(document)[:8]) or 'no fields'}; "
                "expected kind = plan, benchmark = overlap, quality, curves, points, rows, runs, or a trace of `ladder trace`"
            )
    return Results(tuple(tables), tuple(quality), tuple(timelines), tuple(selections))


def _load(file: Path) -> dict[str, Any]:
    try:
        document = json.loads(file.read_text())
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{file} is not a readable JSON result: {error}") from error
    if not isinstance(document, dict):
        raise ValueError(f"{file} must hold a JSON object, found {type(document).__name__}")
    return document


def _timeline(document: Mapping[str, Any], file: Path) -> Timeline:
    try:
        panels = read_trace(document)
        about = document["otherData"]
        # Of a recorded run every rank has its panels; the first rank's are drawn.
        first = [replace(p, title=p.title.removesuffix(FIRST_RANK)) for p in panels if p.title.endswith(FIRST_RANK)]
        return Timeline(tuple(first or panels), str(about["setting"]), str(about["label"]))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{file} is a trace, but none that `ladder trace` wrote; missing or wrong: {error}") from error


def _check_quality(document: Mapping[str, Any], file: Path) -> None:
    try:
        points = [(float(row["converted_layers"]), float(row["value"])) for row in document["quality"]]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{file}: quality must be a list of converted_layers and value, both numbers; wrong: {error}"
        ) from error
    if not points:
        raise ValueError(f"{file}: quality has no points")


def _selection(found: Mapping[str, Any], document: Mapping[str, Any], file: Path) -> Mapping[str, Any]:
    named = {
        "name": str(document.get("model") or file.parent.name).partition(" (")[0],
        "curves": found.get("curves"),
        "original": found.get("original"),
    }
    try:
        selection_chart(named)
    except (KeyError, TypeError, ValueError, AttributeError, StopIteration) as error:
        raise ValueError(
            f"{file}: no curves as `ladder convert --wiring auto` writes them; missing or wrong: {error}"
        ) from error
    return named


def _tasks_table(document: Mapping[str, Any], file: Path) -> Table:
    """Accuracies in per cent with their standard errors: a row for each model."""
    try:
        tasks = tuple(next(iter(document["models"].values())))
        rows = tuple(
            (name, *(f"{100 * scores[task]['value']:.1f} ± {100 * scores[task]['stderr']:.1f}" for task in tasks))
            for name, scores in document["models"].items()
        )
    except (KeyError, TypeError, AttributeError, StopIteration) as error:
        raise ValueError(f"{file}: no tasks as `ladder eval` scores them; missing or wrong: {error!r}") from error
    return Table(f"Tasks: {file.parent.name}", "measured", str(document["tasks"]), ("model", *tasks), rows)


def _need(document: Mapping[str, Any], file: Path, *keys: str) -> None:
    missing = [key for key in keys if key not in document]
    if missing:
        raise ValueError(f"{file} lacks {', '.join(missing)}")


def _plan_table(document: Mapping[str, Any], file: Path) -> Table:
    rows = []
    for row in document.get("rows", []):
        _need(row, file, "tp", "link", "batch", "tokens_per_second", "memory_total_gb", "speedup")
        gains = row["speedup"]
        best = max((name for name in gains if name.startswith("ladder")), key=lambda name: gains[name])
        rows.append(
            (
                f"{row.get('model', '')} on {row.get('device', '')}",
                str(row["tp"]),
                row["link"],
                str(row["batch"]),
                f"{row['tokens_per_second']['standard']:.1f}",
                f"{row['memory_total_gb']:.1f}",
                f"{gains['ladder']:.2f}x",
                f"{gains[best]:.2f}x ({best})",
                f"{gains['parallel']:.2f}x",
                f"{gains['no-comm']:.2f}x",
            )
        )
    columns = (
        "model",
        "tp",
        "link",
        "batch",
        "standard, tokens/s",
        "GB per rank",
        "ladder",
        "best ladder",
        "parallel",
        "no-comm",
    )
    return Table(f"Plan: {file.stem}", "planned", "ladder plan --json", columns, tuple(rows))


def _overlap_table(document: Mapping[str, Any], file: Path) -> Table:
    _need(document, file, "rows", "link", "tp", "batch")
    rows = tuple(
        (
            row["wiring"],
            f"{row['median_ms']:.2f}",
            f"{row['p25_ms']:.2f} to {row['p75_ms']:.2f}" if "p25_ms" in row else "",
            f"{row['speedup']:.2f}x" if "speedup" in row else "",
            f"{row['hidden_percent']:.0f} %" if row.get("hidden_percent") is not None else "",
        )
        for row in document["rows"]
    )
    facts = [f"tp {document['tp']}", f"batch {document['batch']}", str(document["link"])]
    facts += [f"{key} {document[key]}" for key in ("machine", "torch", "date") if key in document]
    columns = ("wiring", "ms per step, median", "quartiles", "speed-up", "communication hidden")
    return Table(f"Overlap: {file.stem}", "measured", "ladder bench overlap; " + ", ".join(facts), columns, rows)


def _emulated_table(document: Mapping[str, Any], file: Path) -> Table:
    rows = []
    for point in result_points([file], "engine", shipped()):
        ours = point.predicted()
        # Agreement with a point that constants were fitted on is no evidence, so none is shown.
        error = f"{100 * (ours / point.measured - 1):+.1f} %" if point.role == "check" else "fitted on it"
        rows.append((point.group, point.wiring, str(point.batch), point.link, f"{point.measured:.2f}", f"{ours:.2f}", error))
    columns = ("engine", "wiring", "batch", "all-reduce", "emulated, ms", "planned, ms", "error of the plan")
    facts = [f"{key} {document[key]}" for key in ("gpu", "torch", "triton", "commit", "date") if document.get(key)]
    source = document.get("source") or "; ".join(["ladder bench decode", *facts] if facts else [file.name])
    return Table(f"Emulated rank: {file.stem}", "emulated", str(source), columns, tuple(rows))


def _list_of_rows(document: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    for key in ("rows", "results", "runs"):
        rows = document.get(key)
        if isinstance(rows, list) and rows and all(isinstance(row, dict) for row in rows):
            return rows
    return None


def _plain_table(document: Mapping[str, Any], file: Path) -> Table:
    """Any other list of rows: every scalar column, as it is."""
    rows = _list_of_rows(document) or []
    columns = tuple(dict.fromkeys(k for row in rows for k, v in row.items() if isinstance(v, str | int | float | type(None))))
    cells = tuple(tuple(_cell(row.get(column)) for column in columns) for row in rows)
    facts = [f"{key} {value}" for key, value in document.items() if isinstance(value, str | int | float)]
    label = "emulated" if "emulated" in json.dumps(document)[:4000] else "measured"
    return Table(str(document.get("benchmark", file.stem)), label, "; ".join(facts[:12]), columns, cells)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
