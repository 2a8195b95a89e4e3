"""docs/results/recovery.md and its charts from results/adapt: long runs, methods at equal tokens, layers to convert."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

from lab.reports.recovery_results import OWN, TARGETS, TEXTS, Results, recipe
from lab.reports.recovery_tasks import TARGET_TASKS, pairs, task_cells
from lab.reports.sources import ROOT, conditions, page, section
from ladder_residual.adapt.selection_chart import ORDERS, selection_chart
from ladder_residual.common.charts import Chart, Series, chart_svg
from ladder_residual.common.markdown import table
from ladder_residual.core.config import Wiring

ABOUT = """Subject: SmolLM2-135M-Instruct (30 layers) from its published 4-bit
weights, dequantised. Losses are nats per token on text that was not trained on. The *control* is the unchanged model after next-token
training on the same text; a *fine-tuned teacher* is that control, used as the teacher. The guide is
[../converting.md](../converting.md); what did not work is in [../lab/recovery.md](../lab/recovery.md)."""
LAYERS = 30
SMOLLM2 = "python -m lab.runs.adapt_smollm2"
SEEDED = "distill 15 chosen, 4M, fine-tuned teacher alone"
# Runs of 4 million tokens: name on the page, name of the run.
METHODS = {
    "15 chosen, distilled": "distill 15 chosen, 4M",
    "15 chosen, distilled, fine-tuned teacher": "distill 15 chosen, 4M, fine-tuned teacher",
    "last 15, distilled": "distill 15, 4M",
    "last 15, distilled in four stages": "progressive 15, 4M",
    "last 15, distilled into LoRA": "lora 15, 4M",
    "last 15, next-token": "sft 15, 4M",
    "all 30, distilled": "distill 30, 4M",
    "all 30, distilled without hidden states": "distill 30 without hidden states, 4M",
    "all 30, distilled in eight stages": "progressive 30, 4M",
    "all 30, distilled into LoRA": "lora 30, 4M",
    "all 30, next-token": "sft 30, 4M",
    "unchanged model, next-token (control)": "control sft, 4M",
}


def pages() -> dict[str, str]:
    """The page and its charts, by file name."""
    results = Results(ROOT / "results" / "adapt")
    title = "SmolLM2, held-out text, before any retraining"
    return {
        "recovery.md": render(results),
        "recovery.svg": chart_svg(recovery_chart(results)),
        "recovery-selection.svg": chart_svg(selection_chart(results.selection, key="selection", title=title)),
    }


def render(results: Results) -> str:
    measured = min(results.target_runs(15)[0][when]["wikitext2"]["tokens"] for when in ("before", "after"))
    made = conditions(results.document)
    sections = [
        section(
            "Loss after recovery",
            "*Closed* is the part of the gap between zero-shot conversion and the original; above 100 % the model has learnt the "
            "text. A fine-tuned teacher lowers the loss most.",
            loss_table(results) + "\n![Gap closed by distillation against tokens](recovery.svg)\n",
            command=f"{SMOLLM2} recovery",
            made=f"{measured:,.0f} tokens of each text. {made}",
        ),
        section(
            "Tasks after recovery",
            "Points of accuracy to the original, bold within one standard error of it; the last column is the share of rows that only "
            "one of the two models got right. Own samples keep the answers best.",
            task_table(results),
            command="python -m lab.runs.adapt_tasks",
            made=made,
        ),
        section(
            "Methods at 4 million tokens",
            "Loss, and in brackets its distance to the original. With half of the layers the methods end close together; with all of "
            "them distillation is well ahead.",
            methods(results) + "\n" + seeds(results),
            command=f"{SMOLLM2} recovery",
            made=made,
        ),
        section(
            "Distillation and next-token training, all else equal",
            "The same start, rows, optimizer and rate, 4 million tokens. Distillation stays nearer to the original on every text; "
            "`recipe` adds hidden states and 0.3 of the text's own loss.",
            pairs(results),
            command=f"{SMOLLM2} pairs",
            made=conditions(results.pairs),
        ),
        section(
            "Refit alone",
            "Rise of the loss, converted→refitted; in brackets what is left. Calibrated on other books, arithmetic, WikiText-2's "
            "validation split.",
            refit_table(results.refits),
            command="python -m lab.runs.adapt_refit smollm2 TEXTS --tokens TOKENS",
            made=f"{results.refits[0]['check_tokens']:,} tokens of each text. {conditions(*results.refits)}",
        ),
        section(
            "Which layers to convert",
            f"Rise of the loss on held-out books before any training, by number k of converted layers. Our choice is "
            f"{against_last(results.selection['curves']['books_heldout'])}.",
            "![Loss before retraining by number of converted layers](recovery-selection.svg)\n\n"
            + selection_table(results.selection),
            command="ladder convert SRC OUT --wiring auto --layers K",
            made=made,
        ),
    ]
    return page("Recovery of converted models", ABOUT, sections)


def _long_runs(results: Results) -> Iterator[tuple[dict[str, Any], list[str]]]:
    """The long runs, and what a row begins with: layers, teacher."""
    for layers in TARGETS:
        for run in results.target_runs(layers):
            which = "all" if layers == max(TARGETS) else "chosen" if "chosen" in run["name"] else "last"
            teacher = "fine-tuned" if run.get("fine_tuned_teacher_tokens") else "original"
            yield run, [f"{which} {layers}", teacher + (OWN if run["name"].endswith(OWN) else "")]


def loss_table(results: Results) -> str:
    rows = []
    for run, begin in _long_runs(results):
        teacher = run.get("fine_tuned_teacher_tokens", 0)
        tokens = f"{run['tokens'] / 1e6:.0f}M" + (f" + {teacher / 1e6:.0f}M" if teacher else "")
        closed = [f"{results.closed(run, text):.1f} %" for text in ("books_heldout", "wikitext2")]
        control = results.closed_to_control(run, "wikitext2")
        rows.append([*begin, tokens, *closed, f"{control:.1f} %" if control else ""])
    return table(["layers", "teacher", "tokens", "closed, books", "closed, WikiText-2", "the same, to the control"], rows)


def task_table(results: Results) -> str:
    rows = [[*begin, *task_cells(results, run["name"])] for run, begin in _long_runs(results)]
    return table(["layers", "teacher", *TARGET_TASKS, "rows scored differently"], rows)


def methods(results: Results) -> str:
    """Runs with equally many tokens."""
    rows = []
    for shown, name in METHODS.items():
        run = results.runs[name]
        losses = {text: run["after"][text]["loss"] for text in TEXTS}
        rows.append(
            [shown, recipe(run), *(f"{loss:.3f} ({loss - results.original[text]:+.3f})" for text, loss in losses.items())]
        )
    return table(["run", "how", *TEXTS.values()], rows)


def seeds(results: Results) -> str:
    """Mean and standard deviation over the runs that differ in their seed alone."""
    runs = [run for name, run in results.runs.items() if name == SEEDED or name.startswith(f"{SEEDED}, seed")]
    parts = []
    for text in TEXTS:
        found = [run["after"][text]["loss"] for run in runs]
        parts.append(f"{TEXTS[text]} {statistics.mean(found):.4f} ± {statistics.stdev(found):.4f}")
    return f"{len(runs)} seeds of `{SEEDED}`: {', '.join(parts)} (standard deviation).\n"


def refit_table(results: list[dict[str, Any]]) -> str:
    rows = []
    for row in sorted((row for found in results for row in found["rows"]), key=lambda row: (row["wiring"], row["tokens"])):
        cells = [f"{row['tokens']:,}"]
        for text in ("books_heldout", "wikitext2"):
            original, converted, refitted = (row["losses"][text][name] for name in ("original", "converted", "refitted"))
            left = (refitted - original) / (converted - original)
            cells.append(f"{converted - original:+.3f}→**{refitted - original:+.3f}** ({left:.0%})")
        layers = row["wiring"].partition(":")[2]
        shown = {"": "all 30", "last-half": "last 15"}.get(layers, f"chosen {len(Wiring.parse(row['wiring'], LAYERS).layers)}")
        rows.append([shown, *cells])
    return table(["layers", "tokens", "books", "WikiText-2"], rows)


def selection_table(found: dict[str, Any], text: str = "books_heldout") -> str:
    """Rise of the loss by order, every fifth k."""
    curves = found["curves"][text]
    shown = [point["k"] for point in curves["ours"] if point["k"] % 5 == 0]
    rows = [[ORDERS[order], *(f"{curves[order][k - 1]['rise']:.3f}" for k in shown)] for order in ORDERS]
    return table(["order", *(f"k = {k}" for k in shown)], rows)


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


def _tokens(run: dict[str, Any], point: dict[str, Any]) -> float:
    """Millions up to a point, with those of the teacher's fine-tuning."""
    return (point["tokens"] + run.get("fine_tuned_teacher_tokens", 0)) / 1e6


def recovery_chart(results: Results) -> Chart:
    series = []
    for colour, layers in enumerate(TARGETS):
        run = results.target_runs(layers)[0]
        for text in ("books_heldout", "wikitext2"):
            start = results.zero_shot_along(run, text)
            points = [
                (_tokens(run, point), 100 * (start - point["texts"][text]["loss"]) / (start - results.original_along(text)))
                for point in run["curve"][1:]
            ]
            name = f"{layers}{', fine-tuned teacher' if run.get('fine_tuned_teacher_tokens') else ''}, {TEXTS[text]}"
            series.append(Series(name, points, colour=2 * colour + (text == "wikitext2")))
    return Chart("recovery", "Gap closed by distillation, held-out text", "tokens (millions)", "gap closed (%)", series)
