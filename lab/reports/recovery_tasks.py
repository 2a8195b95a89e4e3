"""The tasks' part of docs/adaptation.md: accuracy, what changed behind it, and the distance to a long control."""

from __future__ import annotations

import math
from typing import Any

from .results import OWN, TARGETS, TEXTS, Results, recipe, table

TARGET_TASKS = ("arc_easy", "piqa", "hellaswag", "sciq", "winogrande")
FIRST = ", first recipe"
ALONG = {
    "last 15": ("zero-shot 15", "distill 15, 4M", "distill 15" + FIRST, "distill 15, corrected teacher", "distill 15"),
    "our 15": ("zero-shot 15 chosen", "distill 15 chosen, own samples", "distill 15 chosen, corrected teacher"),
    "last 20": ("zero-shot 20", "distill 20" + FIRST, "distill 20, corrected teacher", "distill 20"),
    "our 20": ("zero-shot 20 chosen", "distill 20 chosen, own samples", "distill 20 chosen, corrected teacher"),
    "all 30": ("zero-shot 30", "distill 30"),
}
LONG_CONTROL = "control sft, 24M"
# Pairs of equal tokens and equal optimizer, each below the other; then what trained for longer.
COMPARED = (
    "control sft, 4M",
    "distill 15, 4M",
    "sft 15 muon, 4M",
    "distill 15 adamw, 4M",
    "sft 15, 4M",
    LONG_CONTROL,
    "distill 15 chosen, corrected teacher",
    "distill 15 chosen, own samples",
)


def tasks_table(results: Results) -> str:
    if results.tasks is None:
        return "Not measured yet.\n"
    found = results.tasks["models"]
    names = list(next(iter(found.values())))
    rows = []
    for model, scores in found.items():
        cells = []
        for task in names:
            score = scores[task]
            text = f"{100 * score['value']:.1f} ± {100 * score['stderr']:.1f}"
            if "difference" in score:
                text += f" ({100 * score['difference']:+.1f} ± {100 * score['paired_stderr']:.1f})"
            cells.append(text)
        perplexity = results.tasks.get("perplexity", {}).get(model)
        changed = f"{100 * changed_rows(scores)[0]:.1f}" if "changed" in scores[names[0]] else ""  # the original has none
        rows.append([model, *cells, changed, f"{perplexity['ppl']:.4g}" if perplexity else ""])
    sizes = [f"{task} ({found['original'][task]['n']:,})" for task in names]
    return table(["model", *sizes, "all: scored otherwise, %", "WikiText-2 perplexity, stride 512"], rows)


def within_one_error(results: Results) -> str:
    """For the models healed by distillation and the controls: on which tasks they lost no more than one standard error."""
    if results.tasks is None:
        return ""
    lines = []
    healed = [run["name"] for layers in TARGETS for run in results.target_runs(layers)]
    control = [results.control["name"]] if results.control else []
    for name in (*healed, *control, LONG_CONTROL):
        scores = results.tasks["models"].get(name)
        if scores is None:
            continue
        errors = {task: results.tasks["models"]["original"][task]["stderr"] for task in TARGET_TASKS}
        inside = [task for task in TARGET_TASKS if scores[task]["difference"] >= -errors[task]]
        outside = [f"{task} ({100 * scores[task]['difference']:+.1f})" for task in TARGET_TASKS if task not in inside]
        lines.append(
            f"- {name}: {len(inside)} of {len(TARGET_TASKS)} tasks within one standard error or above"
            + (f"; outside: {', '.join(outside)}" if outside else "")
        )
    return "\n".join(lines) + "\n"


def tasks_along_the_tokens(results: Results) -> str:
    """Accuracy against tokens: models of the same layers, from zero-shot on, at every number of tokens that was scored."""
    if results.tasks is None:
        return "Not measured yet.\n"
    earlier = results.earlier.runs if results.earlier else {}
    runs = results.runs | {name + FIRST: run for name, run in earlier.items()}
    rows = []
    for which, names in ALONG.items():
        for name in names:
            tokens, teacher = 0, ""
            if run := runs.get(name):  # none is zero-shot
                correction = run.get("corrected_teacher_tokens", 0)
                tokens, teacher = run["tokens"] + correction, "corrected" if correction else "original"
            differences = [results.tasks["models"][name][task]["difference"] for task in TARGET_TASKS]
            cells = [f"{100 * value:+.1f}" for value in (*differences, sum(differences) / len(differences))]
            rows.append([which, f"{tokens / 1e6:.0f}M", teacher + (OWN if name.endswith(OWN) else ""), *cells])
    return table(["layers", "tokens", "teacher", *TARGET_TASKS, "mean"], rows)


def changed_rows(scores: dict[str, Any]) -> tuple[float, float, float, int]:
    """Over all tasks: the share of rows scored otherwise than by the original, the lost and the won among them, all rows.

    A row scores 0 or 1, so the difference is won - lost and the changed are won + lost."""
    count = sum(score["n"] for score in scores.values())
    changed = sum(score["n"] * score["changed"] for score in scores.values()) / count
    difference = sum(score["n"] * score["difference"] for score in scores.values()) / count
    return changed, (changed - difference) / 2, (changed + difference) / 2, count


def answered_otherwise(results: Results) -> str:
    """What a difference of accuracies hides: rows lost and rows won cancel in it."""
    if results.tasks is None:
        return "Not measured yet.\n"
    rows, count = [], 0
    for name in COMPARED:
        scores, run = results.tasks["models"].get(name), results.runs.get(name)
        if scores is None or run is None:
            continue
        *_, count = changed_rows(scores)
        loss = run["after"]["wikitext2"]["loss"]
        rows.append([name, recipe(run), *changed_cells(scores), f"{loss:.3f} ({loss - results.original['wikitext2']:+.3f})"])
    return table(["run", "how", *changed_header(count), "WikiText-2 loss (to the original)"], rows)


def changed_header(count: int) -> list[str]:
    return [f"scored otherwise, % of {count:,} rows", "lost", "won", "mean difference, five tasks"]


def changed_cells(scores: dict[str, Any]) -> list[str]:
    changed, lost, won, count = changed_rows(scores)
    error = math.sqrt(changed * (1 - changed) / count)
    mean = sum(scores[task]["difference"] for task in TARGET_TASKS) / len(TARGET_TASKS)
    mean_error = math.hypot(*(scores[task]["paired_stderr"] for task in TARGET_TASKS)) / len(TARGET_TASKS)
    shares = [f"{100 * changed:.1f} ± {100 * error:.1f}", f"{100 * lost:.1f}", f"{100 * won:.1f}"]
    return [*shares, f"{100 * mean:+.1f} ± {100 * mean_error:.1f}"]


def pairs(results: Results) -> str:
    """Runs that differ in the loss alone, each beside its other, and how far each is from the original."""
    if results.pairs is None or results.pair_tasks is None:
        return "Not measured yet.\n"
    original, models = results.pairs["original"]["wikitext2"]["loss"], results.pair_tasks["models"]
    rows, count = [], 0
    scored = (run for run in results.pairs["runs"] if run["name"] in models and not run["problem"])
    for run in sorted(scored, key=_beside):
        *_, count = changed_rows(models[run["name"]])
        loss = run["after"]["wikitext2"]["loss"]
        nearness = [f"{run['to_original'][text]:.3f}" for text in TEXTS]
        cells = [*nearness, f"{loss:.3f} ({loss - original:+.3f})", *changed_cells(models[run["name"]])]
        rows.append([run["name"], recipe(run), *cells])
    header = [*(f"KL, {name}" for name in TEXTS.values()), "WikiText-2 loss (to the original)", *changed_header(count)]
    return table(["run", "how", *header], rows)


def _beside(run: dict[str, Any]) -> tuple[str, str]:
    """Sorts by what a pair shares (layers, optimizer, seed), then by method; the control first."""
    method, _, shared = run["name"].partition(" ")
    return ("" if method == "control" else shared, method)


def to_the_control(results: Results) -> str:
    """Healed models of 15 and 20 layers (30 are far from any control) against the unchanged model after a long training."""
    control = results.runs.get(LONG_CONTROL)
    models = results.tasks["models"] if results.tasks else {}
    if control is None or LONG_CONTROL not in models:
        return "Not measured yet.\n"
    against = models[LONG_CONTROL]
    rows = []
    for run in (run for layers in (15, 20) for run in results.target_runs(layers) if run["name"] in models):
        scores = models[run["name"]]
        gaps = [scores[task]["value"] - against[task]["value"] for task in TARGET_TASKS]
        errors = [math.hypot(scores[task]["stderr"], against[task]["stderr"]) for task in TARGET_TASKS]
        gaps.append(sum(gaps) / len(gaps))
        errors.append(math.hypot(*errors) / len(errors))
        cells = [f"{100 * gap:+.1f} ± {100 * error:.1f}" for gap, error in zip(gaps, errors, strict=True)]
        loss = run["after"]["wikitext2"]["loss"] - control["after"]["wikitext2"]["loss"]
        closed = results.closed_to_control(run, "wikitext2", control)
        cells.append(f"{loss:+.3f}" + ("" if closed is None else f", {closed:.1f} % closed"))
        tokens = round((run["tokens"] + run.get("corrected_teacher_tokens", 0)) / 1e6)
        rows.append([run["name"], f"{tokens}M", *cells])
    return table([f"to `{LONG_CONTROL}`", "tokens", *TARGET_TASKS, "mean", "WikiText-2 loss"], rows)
