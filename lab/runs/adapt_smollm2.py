"""Recovering SmolLM2-135M-Instruct on one GPU: the runs behind docs/results/recovery.md.

    python -m lab.runs.fetch_smollm2 smollm2
    python -m lab.runs.adapt_prepare smollm2 TEXTS rows
    python -m lab.runs.adapt_smollm2 pilot --model smollm2 --rows rows --work work --out results/adapt
    python -m lab.runs.adapt_smollm2 recovery --model smollm2 --rows rows --work work --out results/adapt --rows-per-step 16 --seconds 560
    python -m lab.runs.adapt_smollm2 pairs --model smollm2 --rows rows --work work --out results/adapt --rows-per-step 16 --seconds 560

``pilot`` tries settings in short runs; ``recovery`` makes the runs of the document, most important first, until ``--seconds`` are used
up; ``pairs`` sets distillation beside next-token training, seed by seed, with nothing but the loss between them. Each result
is on disk as soon as it is there. Texts: books, reference works, GSM8K questions with answers, and the model's own samples, drawn
here first; WikiText-2 is measured on and never trained on.
"""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import time
from pathlib import Path
from typing import Any

import torch

from lab.runs.adapt_bench import START, Bench, Scoring, selection, speak
from ladder_residual.adapt.settings import DataSource
from ladder_residual.distributed.world import distributed


def pilot(bench: Bench, million: int) -> None:
    """Short runs: how much of the text's own loss, and how large a step. What was tried before is in docs/lab/recovery.md."""
    half = bench.last(1 / 2)
    short: dict[str, Any] = dict(tokens=2 * million, points=1, warmup=0.05, final_rows=64)
    fewer = dict(batch_tokens=bench.sequence * bench.step_rows // 2)
    for name, wiring, changes in (
        ("15, distillation alone", half, HALF | dict(data_weight=0.0)),
        ("15, data weight 0.3", half, HALF | dict(data_weight=0.3)),
        ("15, data weight 1", half, HALF | dict(data_weight=1.0)),
        ("15, data weight 0.3, half a step", half, HALF | dict(data_weight=0.3) | fewer),
        ("all, data weight 0.3, half a step", "ladder", ALL | dict(data_weight=0.3) | fewer),
    ):
        bench.run(name, wiring, **short | changes)


# Learning rates and optimizer as the pilots found them (docs/lab/recovery.md).
# The teacher comes from 4-bit weights: a part of the text's own loss lets the student be better than it.
MUON = dict(optimizer="muon", other_rate=0.2, hidden_weight=1.0, hidden_share=0.5)
HALF = MUON | dict(learning_rate=1e-3)
MOST = MUON | dict(learning_rate=2e-3)
ALL = MUON | dict(learning_rate=4e-3, warmup=0.03)
SFT = dict(method="sft", learning_rate=3e-4)
EQUAL = 4  # million tokens of the runs that compare methods
CONTROL = f"control sft, {EQUAL}M"  # also the fine-tuned teacher: the original after a short training on the same text


def recovery(bench: Bench, seconds: float, million: int, own: float, requests: Path | None, only: list[str]) -> None:
    """The runs of the document, most important first; ``own`` is the weight of the text's own loss in distillation. ``only``: those
    named, and the control that teachers are fine-tuned by."""
    half, most = bench.last(1 / 2), bench.last(2 / 3)
    stages = bench.stages((1 / 2, 0.4, 0.3, 0.2, 0.13, 0.07, 0.04))
    equal = dict(tokens=EQUAL * million, points=4)
    long = dict(points=12, keep=True)
    fine_tuned = dict(fine_tuned=True)
    alone = fine_tuned | dict(data_weight=0.0)
    short_choice = f"distill 15 chosen, {EQUAL}M"
    # As wide as the teacher's own knowledge: what it writes by itself, little of the books it never chose.
    samples = dict(data=(DataSource("samples", 0.8), DataSource("books", 0.1), DataSource("reference", 0.1)), data_weight=0.0)
    plain = dict(learning_rate=SFT["learning_rate"], data_weight=0.0, keep=True)  # distillation and nothing else changed
    plan: list[tuple[str, str, dict[str, Any]]] = [
        (CONTROL, "standard", SFT | equal | dict(keep=True)),
        (f"distill 15 adamw, {EQUAL}M", half, plain | equal),
        (f"sft 15 muon, {EQUAL}M", half, HALF | dict(method="sft", hidden_weight=0.0, keep=True) | equal),
        ("distill 15 chosen, own samples", "chosen half", HALF | long | samples | dict(tokens=24 * million)),
        ("control sft, 24M", "standard", SFT | long | dict(tokens=24 * million)),
        ("distill 20 chosen, own samples", "chosen most", HALF | long | samples | dict(tokens=24 * million)),
        (f"control sft 1e-3, {EQUAL}M", "standard", SFT | dict(learning_rate=1e-3) | equal),
        (f"lora 30, {EQUAL}M", "ladder", dict(method="lora", learning_rate=2e-3, eager=True) | equal),
        (f"progressive 15, {EQUAL}M", half, HALF | equal | dict(stages=bench.stages((0.9, 0.75, 0.6)), stages_share=0.5)),
        (short_choice, "chosen half", HALF | equal),
        (f"{short_choice}, fine-tuned teacher", "chosen half", HALF | equal | fine_tuned),
        (f"{short_choice}, fine-tuned teacher alone", "chosen half", HALF | equal | alone),
        ("distill 15, fine-tuned teacher", half, HALF | long | alone | dict(tokens=40 * million)),
        ("distill 20, fine-tuned teacher", most, MOST | long | alone | dict(tokens=24 * million)),
        ("distill 20 chosen, fine-tuned teacher", "chosen most", HALF | long | alone | dict(tokens=24 * million)),
        ("distill 15 chosen, fine-tuned teacher", "chosen half", HALF | long | alone | dict(tokens=24 * million)),
        (f"lora 15, {EQUAL}M", half, dict(method="lora", learning_rate=1e-3, eager=True) | equal),
        (f"{short_choice}, fine-tuned teacher alone, seed 1", "chosen half", HALF | equal | alone | dict(seed=1)),
        (f"{short_choice}, fine-tuned teacher alone, seed 2", "chosen half", HALF | equal | alone | dict(seed=2)),
        ("distill 15", half, HALF | long | dict(tokens=48 * million)),
        ("distill 30", "ladder", ALL | long | dict(tokens=48 * million)),
        ("distill 20", most, MOST | long | dict(tokens=40 * million, data_weight=1.0)),
        (f"sft 15, {EQUAL}M", half, SFT | equal | dict(keep=True)),
        (f"distill 15, {EQUAL}M", half, HALF | equal | dict(keep=True)),
        (f"distill 30, {EQUAL}M", "ladder", ALL | equal),
        (f"progressive 30, {EQUAL}M", "ladder", ALL | equal | dict(stages=stages, stages_share=0.5)),
        (f"sft 30, {EQUAL}M", "ladder", SFT | dict(learning_rate=1e-3) | equal),
        (f"distill 30 without hidden states, {EQUAL}M", "ladder", ALL | dict(hidden_weight=0.0) | equal),
    ]
    refuse_unknown(only, plan)
    scored = Scoring(bench, requests)
    scored.model("original", bench.model, "standard")
    if "selection" not in bench.record:
        bench.record["selection"] = selection(bench)
        bench.write()
    ours = {entry["k"]: "ladder:" + ",".join(map(str, entry["layers"])) for entry in bench.record["selection"]["chosen"]}
    chosen = {"chosen half": ours[round(bench.layers / 2)], "chosen most": ours[round(bench.layers * 2 / 3)]}
    zero_shot = {"15": half, "20": most, "30": "ladder", "15 chosen": chosen["chosen half"], "20 chosen": chosen["chosen most"]}
    for name, wiring in zero_shot.items():
        scored.model(f"zero-shot {name}", bench.model, wiring)
    rate = 190_000.0
    for name, wiring, changes in plan:
        wiring = chosen.get(wiring, wiring)
        if bench.done(name) or (only and name not in (CONTROL, *only)):
            continue
        needed = changes["tokens"] / (rate / 2 if changes.get("eager") else rate) + 12
        if time.monotonic() - START + needed > seconds:
            bench.log(f"no time for {name} ({needed:.0f} s)")
            continue
        if changes.get("fine_tuned") and not bench.fine_tuned:
            weights = bench.work / "recovered" / CONTROL
            if not weights.exists():
                bench.log(f"no fine-tuned teacher for {name}: {CONTROL} has not run")
                continue
            bench.load_fine_tuned_teacher(weights, EQUAL * million)
        changes.setdefault("data_weight", 0.0 if changes.get("method") == "sft" else own)
        result = bench.run(name, wiring, **changes)
        if not changes.get("eager"):
            rate = min(result["tokens_per_second"] * 0.95, 230_000.0) or rate
        if "weights" in result:
            scored.model(name, Path(result["weights"]), None)
            if result["tokens"] > EQUAL * million:
                speak(bench, name, Path(result["weights"]))
    bench.write()
    for process in bench.talking:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=60)


def pairs(bench: Bench, seconds: float, million: int, requests: Path | None, only: list[str]) -> None:
    """Distillation and next-token training, each with the same start, rows, optimizer and rate; and distillation as we recommend it."""
    half = bench.last(1 / 2)
    muon = dict(optimizer="muon", other_rate=0.2)
    arms: list[tuple[str, str, dict[str, Any]]] = []
    for which, wiring, how in (
        ("15 adamw", half, dict(learning_rate=SFT["learning_rate"])),
        ("15 muon", half, muon | dict(learning_rate=HALF["learning_rate"])),
        ("30 muon", "ladder", muon | dict(learning_rate=ALL["learning_rate"], warmup=ALL["warmup"])),
    ):
        arms += [(f"distill {which}", wiring, how | dict(data_weight=0.0)), (f"sft {which}", wiring, how | dict(method="sft"))]
    arms += [("recipe 15 muon", half, HALF | dict(data_weight=0.3)), ("control adamw", "standard", dict(SFT))]
    plan = [(f"{name}, seed {seed}", wiring, how | dict(seed=seed)) for seed in range(3) for name, wiring, how in arms]
    refuse_unknown(only, plan)
    scored = Scoring(bench, requests)
    scored.model("original", bench.model, "standard")
    for name, wiring, changes in plan:
        if bench.done(name) or (only and name not in only):
            continue
        if time.monotonic() - START > seconds:
            bench.log(f"no time for {name}")
            continue
        result = bench.run(name, wiring, tokens=EQUAL * million, points=2, keep=True, **changes)
        if "weights" in result:
            scored.model(name, Path(result["weights"]), None)
    bench.write()


def refuse_unknown(only: list[str], plan: list[tuple[str, str, dict[str, Any]]]) -> None:
    if unknown := set(only) - {name for name, *_ in plan}:
        raise SystemExit(f"no such run: {', '.join(sorted(unknown))}; there are {'; '.join(name for name, *_ in plan)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=("pilot", "recovery", "pairs"))
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=100.0, help="begin no further run after this")
    parser.add_argument(
        "--run", action="append", default=[], help="one of the runs of recovery or pairs by its name; may be repeated"
    )
    parser.add_argument("--device", default="auto")
    parser.add_argument("--requests", type=Path, help="what `ladder eval --requests-out` wrote; scored by every model")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--no-graphs", action="store_true")
    parser.add_argument("--million", type=int, default=1_000_000, help="less than a million, to try the script itself")
    parser.add_argument("--rows-per-step", type=int, default=32, help="rows of 1,024 tokens")
    parser.add_argument(
        "--data-weight", type=float, default=0.3, help="of the text's own loss, beside the distance to the teacher"
    )
    parser.add_argument("--own-samples", type=float, default=6.5, help="million tokens the model writes for itself first")
    parser.add_argument("--batch", type=int, default=2048, help="samples drawn side by side")
    parser.add_argument("--length", type=int, default=512, help="tokens of a sample")
    arguments = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    with distributed(arguments.device) as world:
        bench = Bench(
            arguments.model,
            arguments.rows,
            arguments.work,
            arguments.out,
            world,
            arguments.part,
            arguments.rows_per_step,
            not arguments.no_compile,
            not arguments.no_graphs,
        )
        bench.draw_samples(round(arguments.own_samples * arguments.million), batch=arguments.batch, length=arguments.length)
        bench.load()
        bench.measure_original()
        if arguments.part == "pilot":
            pilot(bench, arguments.million)
        elif arguments.part == "pairs":
            pairs(bench, arguments.seconds, arguments.million, arguments.requests, arguments.run)
        else:
            recovery(bench, arguments.seconds, arguments.million, arguments.data_weight, arguments.requests, arguments.run)
        bench.log("done")


if __name__ == "__main__":
    main()
