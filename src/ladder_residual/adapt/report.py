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

TEXTS = {"books_heldout": "books", "wikitext2": "WikiText-2", "samples_heldout": "own samples"}
# Converted layers: how much of the gap was to be closed on held-out books and on WikiText-2, and the runs, the main one first.
TARGETS = {15: (99, 95), 20: (98, 95), 30: (97, 90)}
CORRECTED = ", corrected teacher"
SEEDED = "distill 15 chosen, 4M, corrected teacher alone"
EARLIER = "heal-first.json"  # the same runs with an earlier recipe


class Results:
    """All runs by name, the original's losses, the selection, the tasks."""

    def __init__(self, folder: Path, file: str = "heal.json") -> None:
        self.folder = folder
        self.document = json.loads((folder / file).read_text(encoding="utf-8"))
        self.earlier = Results(folder, EARLIER) if file != EARLIER and (folder / EARLIER).exists() else None
        self.runs: dict[str, Any] = {run["name"]: run for run in self.document["runs"] if not run["problem"]}
        self.original = {text: values["loss"] for text, values in self.document["original"].items()}
        self.selection = self.document.get("selection")
        self.second_selection = _optional(folder / "selection.json")  # of stories15M
        self.tasks = _optional(folder / "tasks.json")
        self.pilots = [pilot for path in sorted(folder.glob("pilot-*.json")) if (pilot := _optional(path))]
        self.control = next((run for name, run in self.runs.items() if name.startswith("control")), None)

    def original_along(self, text: str) -> float:
        """The original on the rows that are measured during a run: what its control began with."""
        return self.original[text] if self.control is None else self.control["curve"][0]["texts"][text]["loss"]

    def losses(self, run: dict[str, Any], text: str) -> tuple[float, float, float]:
        """Original, zero-shot and healed, all on the same rows."""
        rows = {run[when][text]["tokens"] for when in ("before", "after")} | {self.document["original"][text]["tokens"]}
        if len(rows) == 1:
            return self.original[text], run["before"][text]["loss"], run["after"][text]["loss"]
        measured = run["before"][text]["tokens"]
        healed = run["after"] if run["after"][text]["tokens"] == measured else run["curve"][-1]["texts"]
        return self.original_along(text), run["before"][text]["loss"], healed[text]["loss"]

    def closed(self, run: dict[str, Any], text: str) -> float:
        """Per cent of the gap between zero-shot conversion and the original."""
        original, before, after = self.losses(run, text)
        return 100 * (before - after) / (before - original)

    def closed_to_control(self, run: dict[str, Any], text: str) -> float | None:
        """The same up to the control: the unchanged model after a training on the same text. None where rows differ."""
        _, before, after = self.losses(run, text)
        if self.control is None or self.control["after"][text]["tokens"] != run["before"][text]["tokens"]:
            return None
        return 100 * (before - after) / (before - self.control["after"][text]["loss"])

    def target_runs(self, layers: int) -> list[dict[str, Any]]:
        """The long runs that convert so many layers, best recipe first."""
        names = [f"distill {layers}{which}{teacher}" for teacher in (CORRECTED, "") for which in ("", " chosen")]
        return [self.runs[name] for name in names if name in self.runs]

    def zero_shot_along(self, run: dict[str, Any], text: str) -> float:
        """Zero-shot on the rows measured during a run. One that begins with corrected weights begins better than zero-shot."""
        like = (other for other in self.runs.values() if other["wiring"] == run["wiring"])
        return next(other["curve"][0]["texts"][text]["loss"] for other in like if not other.get("corrected_teacher_tokens"))


def _optional(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def targets(results: Results) -> str:
    rows = []
    for layers, (books, wikitext) in TARGETS.items():
        for made in [results, *([results.earlier] if results.earlier else [])]:
            for run in made.target_runs(layers):
                which = "all" if layers == max(TARGETS) else "chosen" if "chosen" in run["name"] else "last"
                correction = run.get("corrected_teacher_tokens", 0)
                tokens = f"{run['tokens'] / 1e6:.0f}M" + (f" + {correction / 1e6:.0f}M" if correction else "")
                weight = run["settings"].get("data_weight", 0.0)
                row = [f"{which} {layers}", "corrected" if correction else "original", tokens, f"{weight:g}"]
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
    for layers in TARGETS:
        run = results.target_runs(layers)[0]
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
    """The runs with equally many tokens; next-token training also against its control."""
    control = results.control
    if control is None:
        return "Not run.\n"
    texts = ("books_heldout", "wikitext2", "samples_heldout")
    rows = []
    for name, run in results.runs.items():
        if run["tokens"] != control["tokens"]:
            continue
        found = {text: run["after"][text]["loss"] for text in texts}
        cells = [f"{found[text]:.3f} ({found[text] - results.original[text]:+.3f})" for text in texts]
        trained = run is not control and run["settings"]["method"] == "sft"
        gaps = [f"{found[text] - control['after'][text]['loss']:+.3f}" for text in texts[:2]] if trained else []
        settings = run["settings"]
        how = f"{settings['optimizer']} {settings['learning_rate']:g}"
        how += f", hidden {settings['hidden_weight']:g}" if settings["hidden_weight"] else ""
        how += f", text {settings['data_weight']:g}" if settings["data_weight"] else ""
        rows.append([name, str(Wiring.parse(run["wiring"], max(TARGETS))), how, *cells, " / ".join(gaps)])
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
        rows.append([model, *cells, f"{perplexity['ppl']:.4g}" if perplexity else ""])
    sizes = [f"{task} ({found['original'][task]['n']:,})" for task in names]
    return table(["model", *sizes, "WikiText-2 perplexity, stride 512"], rows)


def within_one_error(results: Results) -> str:
    """For the models healed by distillation and the control: on which tasks they lost no more than one standard error."""
    if results.tasks is None:
        return ""
    lines = []
    tasks = ("arc_easy", "piqa", "hellaswag", "sciq", "winogrande")
    healed = [run["name"] for layers in TARGETS for run in results.target_runs(layers)]
    control = [results.control["name"]] if results.control else []
    for name in (*healed, *control):
        scores = results.tasks["models"].get(name)
        if scores is None:
            continue
        errors = {task: results.tasks["models"]["original"][task]["stderr"] for task in tasks}
        inside = [task for task in tasks if scores[task]["difference"] >= -errors[task]]
        outside = [f"{task} ({100 * scores[task]['difference']:+.1f})" for task in tasks if task not in inside]
        lines.append(
            f"- {name}: {len(inside)} of {len(tasks)} tasks within one standard error or above"
            + (f"; outside: {', '.join(outside)}" if outside else "")
        )
    return "\n".join(lines) + "\n"


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


def methods_chart(results: Results) -> Chart:
    """Loss on WikiText-2 along the runs with equally many tokens; the first points, far above, are left out."""
    series = []
    for colour, name in enumerate(("sft 15", "distill 15", "lora 15", "sft 30", "distill 30", "progressive 30")):
        curve = results.runs[f"{name}, 4M"]["curve"][1:]
        points = [(point["tokens"] / 1e6, point["texts"]["wikitext2"]["loss"]) for point in curve]
        series.append(Series(name, points, colour=colour))
    return Chart("methods", "Healing by method, WikiText-2", "tokens (millions)", "loss (nats per token)", series)


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
    found = _optional(results.folder / "stories15m.json")
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
    made["adaptation-methods.svg"] = chart_svg(methods_chart(results))
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
