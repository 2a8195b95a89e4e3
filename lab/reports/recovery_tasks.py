"""Tasks of docs/results/recovery.md: points lost or won, the rows that changed behind them, and pairs of equal training."""

from __future__ import annotations

import math
from typing import Any

from lab.reports.recovery_results import TEXTS, Results, recipe
from ladder_residual.common.markdown import table

TARGET_TASKS = ("arc_easy", "piqa", "hellaswag", "sciq", "winogrande")


def task_cells(results: Results, name: str) -> list[str]:
    """Points of difference to the original on each task, bold within one standard error of the original; rows that changed, in %."""
    scores, original = results.tasks["models"][name], results.tasks["models"]["original"]
    cells = []
    for task in TARGET_TASKS:
        difference = scores[task]["difference"]
        text = f"{100 * difference:+.1f}"
        cells.append(f"**{text}**" if difference >= -original[task]["stderr"] else text)
    return [*cells, f"{100 * changed_rows(scores)[0]:.1f} %"]


def changed_rows(scores: dict[str, Any]) -> tuple[float, float, float, int]:
    """Over all tasks: the share of rows scored differently than by the original, the lost and the won among them, all rows.

    A row scores 0 or 1, so the difference is won - lost and the changed are won + lost."""
    count = sum(score["n"] for score in scores.values())
    changed = sum(score["n"] * score["changed"] for score in scores.values()) / count
    difference = sum(score["n"] * score["difference"] for score in scores.values()) / count
    return changed, (changed - difference) / 2, (changed + difference) / 2, count


def pairs(results: Results) -> str:
    """Runs that differ in the loss alone, each beside its other, and how far each is from the original."""
    original, models = results.pairs["original"]["wikitext2"]["loss"], results.pair_tasks["models"]
    rows = []
    scored = (run for run in results.pairs["runs"] if run["name"] in models and not run["problem"])
    for run in sorted(scored, key=_beside):
        changed, _, _, count = changed_rows(models[run["name"]])
        error = math.sqrt(changed * (1 - changed) / count)
        nearness = [f"{run['to_original'][text]:.3f}" for text in TEXTS]
        loss = run["after"]["wikitext2"]["loss"]
        rows.append(
            [run["name"], recipe(run), *nearness, f"{loss - original:+.3f}", f"{100 * changed:.1f} ± {100 * error:.1f}"]
        )
    header = [*(f"KL, {name}" for name in TEXTS.values()), "WikiText-2 loss, to the original", "rows scored differently, %"]
    return table(["run", "how", *header], rows)


def _beside(run: dict[str, Any]) -> tuple[str, str]:
    """Sorts by what a pair shares (layers, optimizer, seed), then by method; the control first."""
    method, _, shared = run["name"].partition(" ")
    return ("" if method == "control" else shared, method)
