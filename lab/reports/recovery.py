"""docs/adaptation.md from the results in JSON: tables, plots, and what each target came to.

    python -m ladder_residual.adapt.report results/adapt docs/adaptation.md

Tables and plots come from the files; the page's words, and the numbers they repeat, are in ``page.md`` beside them.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..config import Wiring
from ..plan.charts import Chart, Series, chart_svg
from ..plan.selection_chart import ORDERS, selection_chart
from .report_tasks import answered_otherwise, pairs, tasks_along_the_tokens, tasks_table, to_the_control, within_one_error
from .results import OWN, TARGETS, TEXTS, Results, optional, recipe, table

METHODS = ("sft", "distill", "lora", "progressive")
PLAIN = ("distill 15", "distill 20")  # the original as the teacher, where the best had a corrected one
SEEDED = "distill 15 chosen, 4M, corrected teacher alone"


def targets(results: Results) -> str:
    rows = []
    for layers, (books, wikitext) in TARGETS.items():
        for made in [results, *([results.earlier] if results.earlier else [])]:
            for run in made.target_runs(layers):
                which = "all" if layers == max(TARGETS) else "chosen" if "chosen" in run["name"] else "last"
                correction = run.get("corrected_teacher_tokens", 0)
                tokens = f"{run['tokens'] / 1e6:.0f}M" + (f" + {correction / 1e6:.0f}M" if correction else "")
                weight = run["settings"].get("data_weight", 0.0)
                which += f" {layers}" + (OWN if run["name"].endswith(OWN) else "")
                row = [which, "corrected" if correction else "original", tokens, f"{weight:g}"]
                for text, target in (("books_heldout", books), ("wikitext2", wikitext)):
                    closed = made.closed(run, text)
                    verdict = "reached" if closed >= target else f"missed by {target - closed:.1f}"
                    losses = " / ".join(f"{loss:.3f}" for loss in made.losses(run, text))
                    control = made.closed_to_control(run, text)
                    row += [losses, f"{closed:.1f} %", f"{target} %: {verdict}", f"{control:.1f} %" if control else "-"]
                rows.append(row)
    header = ["layers", "teacher", "tokens", "weight of the text's own loss"]
    for text in ("books", "WikiText-2"):
        header += [f"{text}: original / zero-shot / healed", "closed", "target", "closed, to the control"]
    return table(header, rows)


def measured_on(results: Results) -> str:
    run = results.target_runs(min(TARGETS))[0]
    return f"{min(run[when]['wikitext2']['tokens'] for when in ('before', 'after')):,.0f}"


def along_the_way(results: Results) -> str:
    """Loss on held-out text against tokens."""
    rows = []
    best = [results.target_runs(layers)[0] for layers in TARGETS]
    for run in [*best, *(results.runs[name] for name in PLAIN)]:
        points = run["curve"]
        shown = [points[round(share * (len(points) - 1))] for share in (0, 0.125, 0.25, 0.5, 0.75, 1)]
        for text in ("books_heldout", "wikitext2"):
            cells = [f"{point['texts'][text]['loss']:.3f} ({_tokens(run, point):.1f}M)" for point in shown]
            ends = [f"{loss:.3f}" for loss in (results.original_along(text), results.zero_shot_along(run, text))]
            rows.append([run["name"].removeprefix("distill "), TEXTS[text], *ends, *cells])
    return table(["layers", "text", "original", "zero-shot", "start", "", "", "", "", "end"], rows)


def _tokens(run: dict[str, Any], point: dict[str, Any]) -> float:
    """Millions up to a point, with those of the teacher's correction."""
    return (point["tokens"] + run.get("corrected_teacher_tokens", 0)) / 1e6


def methods(results: Results) -> str:
    """The runs with equally many tokens; next-token training also against the control that was trained alike."""
    if results.control is None:
        return "Not run.\n"
    texts = ("books_heldout", "wikitext2", "samples_heldout")
    rows = []
    for name, run in results.runs.items():
        if run["tokens"] != results.control["tokens"]:
            continue
        found = {text: run["after"][text]["loss"] for text in texts}
        cells = [f"{found[text]:.3f} ({found[text] - results.original[text]:+.3f})" for text in texts]
        control = results.control_like(run)
        gaps = [f"{found[text] - control['after'][text]['loss']:+.3f}" for text in texts[:2]] if control else []
        rows.append([name, str(Wiring.parse(run["wiring"], max(TARGETS))), recipe(run), *cells, " / ".join(gaps)])
    header = ["run", "wiring", "how", *(f"{TEXTS[text]} (to the original)" for text in texts)]
    return table([*header, "to the control: books / WikiText-2"], sorted(rows, key=lambda row: row[1], reverse=True))


def seeds(results: Results) -> str:
    """Mean and standard deviation over the runs that differ in their seed alone."""
    runs = [run for name, run in results.runs.items() if name == SEEDED or name.startswith(f"{SEEDED}, seed")]
    parts = []
    for text in TEXTS:
        found = [run["after"][text]["loss"] for run in runs]
        parts.append(f"{TEXTS[text]} {statistics.mean(found):.4f} ± {statistics.stdev(found):.4f}")
    return f"{len(runs)} seeds of `{SEEDED}`: {', '.join(parts)} (standard deviation).\n"


def selection_table(found: dict[str, Any] | None) -> str:
    """One table for each text, and which layers were chosen; small models whole, large ones every fifth k."""
    if found is None:
        return "Not measured yet.\n"
    parts = []
    small = len(found["chosen"]) <= 8
    for text, curves in found["curves"].items():
        shown = [point["k"] for point in curves["ours"] if small or point["k"] % 5 == 0]
        rows = [[ORDERS[order], *(f"{curves[order][k - 1]['rise']:.3f}" for k in shown)] for order in ORDERS]
        label = (
            f"the calibration text ({calibrated_on(found)})"
            if text == "calibration"
            else f"{checked_on(found, text)} (had no say)"
        )
        verdict = against_last(curves)
        heading = f"Rise of the loss on {label}, original {found['original'][text]:.3f}; our choice is {verdict}.\n"
        parts.append(heading + "\n" + table(["order", *(f"k = {k}" for k in shown)], rows))
    chosen = [entry for entry in found["chosen"] if small or entry["k"] % 5 == 0]
    rows = [[str(entry["k"]), ", ".join(map(str, entry["layers"])), entry["why"]] for entry in chosen]
    single = sorted(found["single"], key=lambda entry: entry["kl"])
    cheapest = ", ".join(f"{entry['layer']} ({entry['kl']:.4f})" for entry in single[:8])
    dearest = ", ".join(f"{entry['layer']} ({entry['kl']:.2f})" for entry in single[:-5:-1])
    alone = f"Alone, cheapest first: {cheapest}" if small else f"Cheapest alone: {cheapest}; dearest: {dearest}"
    return "\n".join(parts) + "\n" + table(["k", "our layers", "why"], rows) + f"\n{alone} (layer, KL).\n"


def against_last(curves: dict[str, list[dict[str, Any]]]) -> str:
    """At which k our choice is better than the last k layers, at which it is those layers, and whether it is ever worse."""
    pairs = list(zip(curves["ours"], curves["last-k"], strict=True))
    same = [str(ours["k"]) for ours, last in pairs if ours["layers"] == last["layers"]]
    gains = {ours["k"]: last["loss"] - ours["loss"] for ours, last in pairs if ours["layers"] != last["layers"]}
    worse = [str(k) for k, gain in gains.items() if gain < 0]
    better = [gain for gain in gains.values() if gain > 0]
    verdict = f"worse than the last k at k = {', '.join(worse)}" if worse else "at least as good as the last k at every k"
    if better:
        verdict += f", better at {len(better)} of {len(pairs)} (by {min(better):.3f} to {max(better):.3f} nats)"
    return verdict + (f", the same layers at k = {', '.join(same)}" if same else "")


def calibrated_on(found: dict[str, Any]) -> str:
    if "calibration" in found:
        return f"{found['calibration']['tokens']:,} tokens of {found['calibration']['file']}"
    return f"{found['tokens']:,} tokens of books and own samples"


def checked_on(found: dict[str, Any], text: str) -> str:
    return f"{found['check']['tokens']:,} tokens of {found['check']['file']}" if "check" in found else TEXTS[text]


def pilots_table(results: Results) -> str:
    rows = []
    for number, pilot in enumerate(results.pilots, start=1):
        for run in pilot["runs"]:
            if run["problem"]:
                continue
            losses = [f"{run['after'][text]['loss']:.3f}" for text in ("books_heldout", "wikitext2")]
            speed = f"{run['tokens_per_second'] / 1000:.0f}k/s" if run["tokens_per_second"] else ""
            rows.append([f"{number}", run["name"], f"{run['tokens'] / 1e6:.1f}M", *losses, speed])
    return table(["pilot", "what", "tokens", "books", "WikiText-2", "speed"], rows)


def healing_chart(results: Results) -> Chart:
    series = []
    for colour, layers in enumerate(TARGETS):
        run = results.target_runs(layers)[0]
        for text in ("books_heldout", "wikitext2"):
            start = results.zero_shot_along(run, text)
            points = [
                (_tokens(run, point), 100 * (start - point["texts"][text]["loss"]) / (start - results.original_along(text)))
                for point in run["curve"][1:]
            ]
            name = f"{layers}{', corrected teacher' if run.get('corrected_teacher_tokens') else ''}, {TEXTS[text]}"
            series.append(Series(name, points, colour=2 * colour + (text == "wikitext2")))
    return Chart("healing", "Gap closed by distillation, held-out text", "tokens (millions)", "gap closed (%)", series)


def damage_chart(results: Results) -> Chart:
    return selection_chart(results.selection, key="damage", title="SmolLM2, held-out text, before any retraining")


def conditions(results: Results) -> str:
    document = results.document
    long = [run for layers in TARGETS for run in results.target_runs(layers)]
    speeds = [run["tokens"] / run["seconds"] for run in long]
    speed = f"; long runs {min(speeds) / 1e3:.0f}k to {max(speeds) / 1e3:.0f}k tokens/s, teacher and measurements included"
    return (
        f"{document['date']}, {document['device']}, torch {document['torch']}, transformers {document['transformers']}{speed}."
    )


def methods_chart(results: Results, layers: int) -> Chart:
    """Loss on WikiText-2 along the runs with equally many tokens; the first points, far above, are left out. Where a run was not
    measured at its end along the way, its last point is the one of the table."""
    series = []
    names = [f"{how} {layers}" for how in METHODS]
    names += ["control sft"] if layers < max(TARGETS) else []  # far below all others there
    for colour, name in enumerate(names):
        run = results.runs[f"{name}, 4M"]
        points = [(point["tokens"] / 1e6, point["texts"]["wikitext2"]["loss"]) for point in run["curve"][1:]]
        if run["curve"][-1]["tokens"] < run["tokens"]:
            points.append((run["tokens"] / 1e6, run["after"]["wikitext2"]["loss"]))
        series.append(Series(name, points, colour=colour))
    title = f"Healing by method, {layers} layers, WikiText-2"
    return Chart(f"methods-{layers}", title, "tokens (millions)", "loss (nats per token)", series)


def words(results: Results) -> str:
    """What the checkpoints answered, in full sentences as far as they fit."""
    questions = (
        "What is the capital of France?",
        "Write a short story about a lighthouse keeper.",
        "Explain why the sky is blue to a child.",
    )
    rows = []
    for path in sorted(results.folder.glob("text-*.jsonl"), key=lambda path: ("original" not in path.name, path.name)):
        answers = [json.loads(line)["text"] for line in path.read_text(encoding="utf-8").splitlines()]
        short = [" ".join(answer.split())[:200] + (" ..." if len(answer) > 200 else "") for answer in answers]
        rows.append([path.stem.removeprefix("text-").replace("-", " "), *short])
    return table(["checkpoint", *questions], rows)


def second_subject(results: Results) -> str:
    """stories15M: methods that differ in one thing."""
    found = optional(results.folder / "stories15m.json")
    if found is None:
        return "Not run.\n"
    rows = []
    control = next(run for run in found["runs"] if run["name"] == "control sft")
    for run in found["runs"]:
        first, last = (run["curve"][at]["texts"] for at in (0, -1))
        cells = []
        for text in ("heldout.jsonl", "shakespeare.txt"):
            original = control["curve"][0]["texts"][text]["loss"]
            cells.append(f"{first[text]['loss']:.3f} -> {last[text]['loss']:.3f} ({last[text]['loss'] - original:+.3f})")
        to_control = last["heldout.jsonl"]["loss"] - control["curve"][-1]["texts"]["heldout.jsonl"]["loss"]
        rows.append([run["name"], run["wiring"], *cells, "" if run is control else f"{to_control:+.3f}"])
    return table(
        ["run", "wiring", "stories (to the original)", "Shakespeare (to the original)", "stories, to the control"], rows
    )


FIELDS: dict[str, Callable[[Results], str]] = {
    "targets": targets,
    "measured on": measured_on,
    "along the way": along_the_way,
    "methods": methods,
    "seeds": seeds,
    "selection": lambda results: selection_table(results.selection),
    "second selection": lambda results: selection_table(results.second_selection),
    "tasks": tasks_table,
    "within one error": within_one_error,
    "tasks along the tokens": tasks_along_the_tokens,
    "answered otherwise": answered_otherwise,
    "pairs": pairs,
    "to the control": to_the_control,
    "pilots": pilots_table,
    "words": words,
    "second subject": second_subject,
    "conditions": conditions,
}


def render(folder: Path) -> dict[str, str]:
    """The page and its plots, by file name."""
    results = Results(folder)
    page = (folder / "page.md").read_text(encoding="utf-8")
    for name, make in FIELDS.items():
        page = page.replace(f"<!-- {name} -->\n", make(results)).replace(f"<!-- {name} -->", make(results))
    made = {"adaptation.md": page, "adaptation-healing.svg": chart_svg(healing_chart(results))}
    made |= {f"adaptation-methods-{layers}.svg": chart_svg(methods_chart(results, layers)) for layers in (15, 30)}
    if results.selection is not None:  # its picture is named in the page
        made["adaptation-damage.svg"] = chart_svg(damage_chart(results))
    return made


def main() -> None:
    folder, target = Path(sys.argv[1]), Path(sys.argv[2])
    for name, content in render(folder).items():
        target.with_name(name).write_text(content, encoding="utf-8")
        print(f"written  {target.with_name(name)}")


if __name__ == "__main__":
    main()
