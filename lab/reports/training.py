"""docs/results/training.md and its chart from results/train: six wirings compared, steps on one GPU and under tensor parallelism."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from lab.reports.sources import conditions, page, read_results, section
from ladder_residual.common.charts import MEASURED, PLANNED, Chart, Series, chart_svg
from ladder_residual.common.markdown import table
from ladder_residual.train.dry_run import estimate
from ladder_residual.train.recipe import Recipe

ORDER = ("standard", "ladder", "hybrid-half", "parallel", "desync-2x", "delayed-1")
SPECS = {"hybrid-half": "ladder:last-half"}
# The link decides what a wiring gains: NVLink, and GPUs of one host without it.
LINKS = ("nccl", "nccl-no-p2p")


def pages() -> dict[str, str]:
    documents = read_results("train")
    return {"training.md": render(documents), "training-comparison.svg": chart_svg(loss_chart(documents["comparison"]))}


def render(documents: Mapping[str, Any]) -> str:
    comparison, speed = documents["comparison"], documents["speed"]
    hosts, emulated = documents["cpu-tp2-100mbit"], documents["tp8-emulated"]
    sections = [
        section(
            "Loss at equal tokens",
            "47M parameters, 21 million tokens of public-domain books a run, the same data order and hyper-parameters for "
            "all wirings. The ladder is ahead of standard at this length; at 100 billion tokens the paper finds it level "
            "(1.2B) or 1 % behind (3.5B).",
            loss_table(comparison) + "\n![Validation loss of the wirings](training-comparison.svg)\n\n"
            "± behind a loss is the standard deviation over seeds, behind a gap the standard error of the mean of the gaps.",
            command="python -m lab.runs.train_comparison --data data/books --out results/train",
            made=conditions(comparison),
        ),
        section(
            "Loss at equal time",
            "Each wiring runs at its *planned* speed for an 8B model at TP=8 (`ladder train --dry-run`), and its measured "
            "loss is read when the fastest is through. A wiring that has seen fewer tokens is also less far down its "
            "learning-rate schedule.",
            equal_time_table(comparison),
        ),
        section(
            "Steps on one GPU",
            "Forward, backward, clipping and AdamW in bf16 on random tokens, standard and ladder alternating. MFU counts "
            "needed FLOPs only, against 990 TFLOP/s.",
            speed_table(speed),
            command="python -m lab.runs.train_speed --out results/train/speed.json",
            made=conditions(speed),
        ),
        section(
            "Steps under tensor parallelism, two hosts",
            "Two network namespaces, a link of 5 ms and 100 Mbit/s, six layers of a 1B shape, 64 tokens a step. The "
            "ladder step takes about as long as its 26 all-reduces alone.",
            step_table(hosts),
            command="python -m lab.hosts.train --link 5ms/100mbit --model ladder-1b --layers 6 --vocabulary 4096 --sequence 64 "
            "--wirings standard,ladder:last-half,ladder,desync-2x --repeats 12",
            made=conditions(hosts),
        ),
        section(
            "Steps under tensor parallelism, TP=8 emulated",
            "One rank, eight layers of Llama-3.1-8B, 4,096 tokens, bf16, blocks compiled, 32 MiB per all-reduce. The "
            "links are NCCL over NVLink as measured on H200, PCIe without peer access (14 GB/s) and a faster PCIe (40 "
            "GB/s).",
            step_table(emulated),
            command="python -m lab.runs.train_tp8 --out results/train/tp8-emulated.json",
            made=conditions(emulated),
        ),
    ]
    if sizes := documents.get("sizes"):
        sections.insert(1, size_section(sizes))
    about = "The guide is [../training.md](../training.md), readings and open questions are in [../lab/training.md](../lab/training.md)."
    return page("Training", about, sections)


def size_section(document: Mapping[str, Any]) -> str:
    gaps, reading = size_gaps(document), "Ladder and standard with the best learning rate of each, 300 million tokens a run."
    if len({parameters for parameters, _ in gaps}) > 1:
        slope, error = trend(gaps)
        reading += f" A factor of ten in parameters moves the gap by {slope:+.2f} ± {error:.2f} % of the loss (least squares)."
    return section(
        "Loss across sizes",
        reading,
        size_table(document),
        command="python -m lab.runs.train_sizes --out results/train/sizes.json",
        made=conditions(document),
    )


def size_gaps(document: Mapping[str, Any]) -> list[tuple[float, float]]:
    """Parameters of a size, and by how many per cent ladder's final loss is above standard's, for each seed of the size."""
    found = []
    for own in _by_size(document).values():
        losses = {(run["wiring"], run["seed"]): run["valid"][-1][1] for run in own}
        for (wiring, seed), loss in losses.items():
            if wiring == "ladder" and ("standard", seed) in losses:
                found.append((own[0]["parameters"], 100 * (loss / losses["standard", seed] - 1)))
    return found


def _by_size(document: Mapping[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Runs of the two wirings at the depth of the size. Of a sweep the best rate of each wiring counts."""
    best: dict[str, dict[tuple[str, int], dict[str, Any]]] = {}
    for run in document["runs"]:
        if run["wiring"] in ("standard", "ladder") and not run["depth"]:
            of_size = best.setdefault(run["size"], {})
            kept = of_size.setdefault((run["wiring"], run["seed"]), run)
            if run["valid"][-1][1] < kept["valid"][-1][1]:
                of_size[run["wiring"], run["seed"]] = run
    return {size: list(of_size.values()) for size, of_size in best.items()}


def trend(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Of the gaps over the decimal logarithm of the parameters: slope of the least-squares line, and its standard error."""
    xs, ys = [math.log10(parameters) for parameters, _ in points], [gap for _, gap in points]
    line = statistics.linear_regression(xs, ys)
    left = sum((y - line.intercept - line.slope * x) ** 2 for x, y in zip(xs, ys, strict=True))
    spread = sum((x - statistics.mean(xs)) ** 2 for x in xs)
    return line.slope, math.sqrt(left / (len(xs) - 2) / spread) if len(xs) > 2 else math.inf


def size_table(document: Mapping[str, Any]) -> str:
    rows = []
    for size, own in _by_size(document).items():
        parameters = own[0]["parameters"]
        gaps = [gap for of_size, gap in size_gaps(document) if of_size == parameters]
        cells = [size, f"{parameters / 1e6:.0f}M", len(gaps)]
        for wiring in ("standard", "ladder"):
            finals = [run["valid"][-1][1] for run in own if run["wiring"] == wiring]
            cells.append(_with_spread(finals))
        rows.append([*cells, f"{_with_error(gaps, '+.2f')} %", f"{own[0]['tokens_per_s']:,.0f}"])
    return table(["size", "parameters", "seeds", "standard", "ladder", "ladder against standard", "tokens/s"], rows)


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
    rows = []
    for wiring, own in runs.items():
        finals = [run["valid"][-1][1] for run in own]
        gaps = [100 * (run["valid"][-1][1] / base[run["seed"]] - 1) for run in own if run["seed"] in base]
        trained = [statistics.mean(loss for _, loss in run["losses"][-max(1, len(run["losses"]) // 10) :]) for run in own]
        gap = "" if wiring == "standard" else f"{_with_error(gaps, '+.2f')} %"
        rows.append([wiring, len(own), _with_spread(finals), gap, f"{statistics.mean(trained):.4f}"])
    return table(["wiring", "seeds", "validation loss", "against standard, same seeds", "training loss, last tenth"], rows)


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
    rows = []
    for wiring, own in runs.items():
        cells = [wiring]
        for column in columns:
            speed, share = column[wiring]
            losses = [_at(run["valid"], share * run["valid"][-1][0]) for run in own]
            cells += [f"{speed:.2f}x", f"{100 * share:.0f} %", f"{statistics.mean(losses):.4f}"]
        rows.append(cells)
    return table(head, rows)


def _at(curve: Sequence[Sequence[float]], step: float) -> float:
    """The loss at a step, between two evaluations on a straight line."""
    for (low, before), (high, after) in itertools.pairwise(curve):
        if low <= step <= high:
            return before + (after - before) * (step - low) / (high - low)
    return curve[-1][1]


def speed_table(document: Mapping[str, Any]) -> str:
    head = ["model", "sequence", "rows"]
    for wiring in ("standard", "ladder"):
        head += [f"{wiring} tokens/s", "ms/step", "MFU"]
    rows = []
    for row in document["rows"]:
        cells = [f"{row['parameters'] / 1e6:.0f}M ({row['shape']})", str(row["sequence"]), str(row["rows"])]
        for wiring in ("standard", "ladder"):
            found = row[wiring]
            rounds = f"{found['step_ms']:.1f} ({min(found['all_ms']):.1f}-{max(found['all_ms']):.1f})"
            cells += [f"{found['tokens_per_s']:,.0f}", rounds, f"{found['mfu']:.1%}" if "mfu" in found else ""]
        rows.append([*cells, f"{row['ladder_over_standard']:.3f}"])
    return table([*head, "ladder / standard"], rows)


def step_table(document: Mapping[str, Any]) -> str:
    rows = []
    for row in document["rows"]:
        bound = row["wiring"] == "no-comm"
        hidden = None if bound or row["wiring"] == "standard" else row["hidden_percent"]
        rows.append(
            [
                row["link"],
                "no communication (bound)" if bound else row["wiring"],
                f"{row['median_ms']:.1f} ({row['p25_ms']:.1f}-{row['p75_ms']:.1f})",
                f"{row['forward_ms']:.1f}",
                f"{row['backward_ms']:.1f}",
                f"{row['speedup']:.2f}x",
                None if hidden is None else f"{hidden:.0f} %",
            ]
        )
    return table(["link", "wiring", "ms/step", "forward", "backward", "speed-up", "communication hidden"], rows)
