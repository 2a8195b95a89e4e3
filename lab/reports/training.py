"""Tables and curves of ``docs/training.md`` from the committed results. No torch.

    ladder train report results/train docs/training.md

Text between ``<!-- train: NAME -->`` and ``<!-- end -->`` is replaced by what the results say; the rest of the page is written by hand.
"""

from __future__ import annotations

import itertools
import json
import math
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..plan.charts import MEASURED, PLANNED, Chart, Series, chart_svg
from .dry_run import estimate
from .recipe import Recipe

BLOCK = re.compile(r"(<!-- train: (\S+) -->\n).*?(<!-- end -->)", re.S)
ORDER = ("standard", "ladder", "hybrid-half", "parallel", "desync-2x", "delayed-1")
SPECS = {"hybrid-half": "ladder:last-half"}
# The link decides what a wiring gains: NVLink, and GPUs of one host without it.
LINKS = ("nccl", "nccl-no-p2p")


def update(results: Path, page: Path) -> list[str]:
    """Rewrite the blocks of ``page`` and the curves beside it; the names of the blocks."""
    text, done = page.read_text(encoding="utf-8"), []
    documents = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(results.glob("*.json"))}

    def block(match: re.Match[str]) -> str:
        name = match[2]
        done.append(name)
        return f"{match[1]}{rendered(name, documents)}{match[3]}"

    text = BLOCK.sub(block, text)
    for name, chart in charts(documents).items():
        (page.parent / f"{name}.svg").write_text(chart_svg(chart), encoding="utf-8")
    page.write_text(text, encoding="utf-8")
    return done


def rendered(name: str, documents: Mapping[str, Any]) -> str:
    kind, _, stem = name.partition(":")
    makers: dict[str, Callable[[Any], str]] = {
        "losses": loss_table,
        "equal-time": equal_time_table,
        "speed": speed_table,
        "steps": step_table,
        "source": source_line,
    }
    if kind not in makers:
        raise ValueError(f"the page asks for {name!r}; known: {', '.join(makers)} with a result's name after a colon")
    if stem not in documents:
        raise ValueError(f"the page asks for {name!r}, but there is no {stem}.json; there are {', '.join(documents)}")
    return makers[kind](documents[stem])


def charts(documents: Mapping[str, Any]) -> dict[str, Chart]:
    return {
        f"training-{stem}": loss_chart(document)
        for stem, document in documents.items()
        if document.get("benchmark") == "train-comparison"
    }


def by_wiring(document: Mapping[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Finished runs by wiring, in the order of the page."""
    found: dict[str, list[dict[str, Any]]] = {}
    for run in document["runs"]:
        if run["state"] == "done":
            found.setdefault(run["wiring"], []).append(run)
    return {wiring: found[wiring] for wiring in ORDER if wiring in found}


def loss_table(document: Mapping[str, Any]) -> str:
    runs = by_wiring(document)
    base = {run["seed"]: run["valid"][-1][1] for run in runs["standard"]}
    lines = [
        "| wiring | seeds | validation loss | against standard, same seeds | training loss, last tenth |",
        "|---|---|---|---|---|",
    ]
    for wiring, own in runs.items():
        finals = [run["valid"][-1][1] for run in own]
        gaps = [100 * (run["valid"][-1][1] / base[run["seed"]] - 1) for run in own if run["seed"] in base]
        trained = [statistics.mean(loss for _, loss in run["losses"][-max(1, len(run["losses"]) // 10) :]) for run in own]
        gap = "" if wiring == "standard" else f"{_with_error(gaps, '+.2f')} %"
        lines.append(f"| {wiring} | {len(own)} | {_with_spread(finals)} | {gap} | {statistics.mean(trained):.4f} |")
    return "\n".join(lines) + "\n"


def _with_spread(values: Sequence[float]) -> str:
    spread = f" ± {statistics.stdev(values):.4f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.4f}{spread}"


def _with_error(values: Sequence[float], form: str) -> str:
    """Mean and its standard error, where several seeds allow one."""
    error = f" ± {statistics.stdev(values) / math.sqrt(len(values)):.2f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):{form}}{error}"


def loss_chart(document: Mapping[str, Any]) -> Chart:
    """Validation loss against tokens, the mean over seeds; the first tenth is left out, where all fall alike."""
    million = document["tokens_per_step"] / 1e6
    series = []
    for colour, (wiring, own) in enumerate(by_wiring(document).items()):
        steps = [step for step, _ in own[0]["valid"]]
        points = [
            (step * million, statistics.mean(run["valid"][index][1] for run in own))
            for index, step in enumerate(steps)
            if step > 0.1 * steps[-1]
        ]
        series.append(Series(wiring, points, PLANNED if wiring in ("standard", "ladder") else MEASURED, colour))
    return Chart(
        f"training-{document['shape']}",
        f"Validation loss, {document['parameters'] / 1e6:.0f}M parameters (lines: mean of the seeds; dots: one seed)",
        "million tokens",
        "loss on held-out books",
        series,
    )


def planned_speeds(link: str) -> dict[str, float]:
    """Training steps per second over standard's, of an 8B model at TP=8, by the dry run's cost model."""
    seconds = {}
    for wiring in ORDER:
        recipe = Recipe.from_dict(
            {
                "model": {"preset": "llama-3.1-8b", "wiring": SPECS.get(wiring, wiring)},
                "data": {"sequence": 4096},
                "batch": {"rows": 2, "micro_rows": 2},
                "parallel": {"tp": 8, "dp": 1},
                "run": {"steps": 1},
            }
        )
        seconds[wiring] = estimate(recipe, device="h200" if link == "nccl" else "h100", link=link)["step_seconds"]
    return {wiring: seconds["standard"] / value for wiring, value in seconds.items()}


def equal_time_table(document: Mapping[str, Any]) -> str:
    """Loss when the fastest wiring is through: the others have seen fewer tokens by then."""
    runs = by_wiring(document)
    head = ["wiring"]
    columns = []
    for link in LINKS:
        speeds = {wiring: value for wiring, value in planned_speeds(link).items() if wiring in runs}
        fastest = max(speeds.values())
        head += [f"speed at TP=8, {link}", "tokens seen", "loss at equal time"]
        columns.append({wiring: (speed, speed / fastest) for wiring, speed in speeds.items()})
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for wiring, own in runs.items():
        cells = [wiring]
        for column in columns:
            speed, share = column[wiring]
            losses = [_at(run["valid"], share * run["valid"][-1][0]) for run in own]
            cells += [f"{speed:.2f}x", f"{100 * share:.0f} %", f"{statistics.mean(losses):.4f}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _at(curve: Sequence[Sequence[float]], step: float) -> float:
    """The loss at a step, between two evaluations on a straight line."""
    for (low, before), (high, after) in itertools.pairwise(curve):
        if low <= step <= high:
            return before + (after - before) * (step - low) / (high - low)
    return curve[-1][1]


def speed_table(document: Mapping[str, Any]) -> str:
    lines = [
        "| model | sequence | rows | standard tokens/s | ms a step | MFU | ladder tokens/s | ms a step | MFU | ladder / standard |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in document["rows"]:
        cells = [f"{row['parameters'] / 1e6:.0f}M ({row['shape']})", str(row["sequence"]), str(row["rows"])]
        for wiring in ("standard", "ladder"):
            found = row[wiring]
            rounds = f"{found['step_ms']:.1f} ({min(found['all_ms']):.1f}-{max(found['all_ms']):.1f})"
            cells += [f"{found['tokens_per_s']:,.0f}", rounds, f"{found['mfu']:.1%}" if "mfu" in found else ""]
        lines.append("| " + " | ".join([*cells, f"{row['ladder_over_standard']:.3f}"]) + " |")
    return "\n".join(lines) + "\n"


def step_table(document: Mapping[str, Any]) -> str:
    lines = [
        "| link | wiring | ms a step | forward | backward | speed-up | communication hidden |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in document["rows"]:
        bound = row["wiring"] == "no-comm"
        hidden = (
            "" if bound or row["wiring"] == "standard" or row["hidden_percent"] is None else f"{row['hidden_percent']:.0f} %"
        )
        lines.append(
            f"| {row['link']} | {'no communication (bound)' if bound else row['wiring']} | {row['median_ms']:.1f} "
            f"({row['p25_ms']:.1f}-{row['p75_ms']:.1f}) | {row['forward_ms']:.1f} | {row['backward_ms']:.1f} | {row['speedup']:.2f}x "
            f"| {hidden} |"
        )
    return "\n".join(lines) + "\n"


def source_line(document: Mapping[str, Any]) -> str:
    machine = document.get("device") or document["machine"]
    return f"{document['date']}, {machine}, torch {document['torch']}, commit {document['commit']}.\n"
