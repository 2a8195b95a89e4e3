"""Speed-up by batch, ranks, link, size and converted layers: planned lines beside the paper's dots."""

from __future__ import annotations

from math import log2
from typing import Any

from lab.planner.points import Point, emulated_points, paper_points
from lab.planner.points import document as data_document
from ladder_residual.common.charts import PAPER, PLANNED, Chart, Series
from ladder_residual.plan.hardware import shipped
from ladder_residual.plan.planner import TWO_STREAM, Case, hybrid_curve, make_cases
from ladder_residual.report.figures import quality_chart, step_chart

SETTING = {"device": "h100", "prompt": 1024, "new": 512}
BATCHES, RANKS = (1, 2, 4, 8, 16, 32, 64), (2, 4, 8)


def reference_case(model: str = "llama-3-70b", tp: int = 8, link: str = "nccl", batch: int = 1, **more: Any) -> Case:
    [(_, case)] = make_cases(model, **{**SETTING, "tp": [tp], "link": [link], "batch": [batch], **more})
    return case


def _gain(case: Case, wiring: str) -> float:
    return case.tokens_per_second(wiring) / case.tokens_per_second("standard")


def _paper(group: str, link: str, wiring: str, quantity: str = "speedup") -> list[Point]:
    return [
        p for p in paper_points() if (p.link, p.wiring, p.quantity) == (link, wiring, quantity) and p.group.startswith(group)
    ]


def by_batch() -> list[Chart]:
    """The paper's 70B figure: NVLink and P2P off, planned with the paper's engine."""
    charts = []
    for link, name in (("nccl", "NVLink, NCCL"), ("nccl-no-p2p", "P2P off")):
        series = []
        for colour, wiring in enumerate(("ladder", "parallel", "no-comm")):
            cases = [reference_case(batch=batch, link=link, engine_name="paper") for batch in BATCHES]
            series.append(Series(f"{wiring}, planned", [(log2(c.batch), _gain(c, wiring)) for c in cases], PLANNED, colour))
            dots = [(log2(p.batch), p.measured) for p in _paper("70B table", link, wiring)]
            if dots:
                series.append(Series(f"{wiring}, paper", dots, PAPER, colour))
        title = f"Llama-3-70B, 8x H100, {name}"
        ticks = [(log2(batch), str(batch)) for batch in BATCHES]
        charts.append(Chart(f"batch-{link}", title, "batch", "speed-up over standard", series, ticks=ticks))
    return charts


def by_ranks() -> Chart:
    series = []
    for colour, wiring in enumerate(("ladder", "parallel", "no-comm")):
        cases = [reference_case(tp=tp, engine_name="paper") for tp in RANKS]
        series.append(Series(f"{wiring}, planned", [(log2(c.tp), _gain(c, wiring)) for c in cases], PLANNED, colour))
        dots = [(log2(p.tp), p.measured) for p in _paper("70B TP2", "nccl", wiring)]
        dots += [(log2(p.tp), p.measured) for p in _paper("70B table", "nccl", wiring) if p.batch == 1]
        series.append(Series(f"{wiring}, paper", dots, PAPER, colour))
    title, ticks = "Llama-3-70B, NVLink, batch 1", [(log2(tp), str(tp)) for tp in RANKS]
    return Chart("ranks", title, "tensor-parallel ranks", "speed-up over standard", series, ticks=ticks)


def by_link() -> Chart:
    """What the choice of all-reduce leaves to gain, with this project's engine."""
    hardware, device = shipped(), shipped().device("h100")
    names = ["one-shot", "vllm", "sglang", "nccl", "nccl-no-p2p", "20gbe"]
    names.sort(key=lambda name: hardware.link(name, device).us(16384, 8))
    series = []
    for colour, wiring in enumerate(("ladder", TWO_STREAM, "parallel", "no-comm")):
        points = [
            (float(i), _gain(reference_case(link=name), wiring))
            for i, name in enumerate(names)
            if name != "20gbe" or wiring != "no-comm"
        ]
        series.append(Series(f"{wiring}, planned", points, PLANNED, colour))
    note = "20gbe joins eight hosts; its no-comm bound is off the scale."
    ticks = [(float(i), name) for i, name in enumerate(names)]
    return Chart(
        "link", "Llama-3-70B, tp 8, batch 1, by link", "link", "speed-up over standard", series, ticks=ticks, note=note
    )


SIZES = (
    ("ladder-1b", "1B"),
    ("ladder-3b-tp8", "3B"),
    ("llama-3.1-8b", "8B"),
    ("codellama-34b", "34B"),
    ("llama-3-70b", "70B"),
    ("bloom-176b", "176B"),
)


def by_size() -> Chart:
    series = []
    for colour, (link, name) in enumerate((("nccl", "NVLink"), ("nccl-no-p2p", "P2P off"))):
        gains = [
            (float(i), _gain(reference_case(model, link=link, batch=4, engine_name="paper"), "ladder"))
            for i, (model, _) in enumerate(SIZES)
        ]
        series.append(Series(f"{name}, planned", gains, PLANNED, colour))
        order = {f"sizes {model}": float(i) for i, (model, _) in enumerate(SIZES)}
        dots = [(order[p.group], p.measured) for p in _paper("sizes", link, "ladder")]
        series.append(Series(f"{name}, paper", dots, PAPER, colour))
    ticks = [(float(i), text) for i, (_, text) in enumerate(SIZES)]
    return Chart("size", "Ladder by model size, tp 8, batch 4", "parameters", "speed-up over standard", series, ticks=ticks)


def converted_layers() -> Chart:
    series = []
    for colour, (link, name) in enumerate((("nccl", "NVLink, NCCL"), ("nccl-no-p2p", "P2P off"), ("one-shot", "one-shot"))):
        case = reference_case("llama-3.1-8b", link=link, batch=1)
        points = [(float(k), gain) for k, gain in hybrid_curve(case)]
        series.append(Series(f"{name}, planned", points, PLANNED, colour))
    title = "Llama-3.1-8B, tp 8: speed-up by converted layers"
    return Chart("converted", title, "converted layers (the last k of 32)", "speed-up over standard", series)


def quality() -> Chart:
    """The paper's averages against converted layers."""
    average = {name: row[-1] for name, row in data_document("paper")["quality"]["adaptation"]["rows"].items()}
    retrained = [(0.0, average["original"])]
    retrained += [(float(k), average[f"last {k}, retrained on 3B tokens"]) for k in (16, 20)]
    series = [
        Series("paper, Llama-3.1-8B retrained on 3B tokens", retrained, PAPER, 0),
        Series("paper, last 16, not retrained", [(16.0, average["last 16 layers ladder, no retraining"])], PAPER, 1),
    ]
    return quality_chart((), series, "The paper's average of nine benchmarks (MMLU to AlpacaEval); higher is better.")


def emulated_rank() -> Chart:
    """Our own emulated rank against the plan: one H200 with a shard of 70B, all-reduce times set by hand."""
    points = [p for p in emulated_points() if p.group.startswith("prototype")]
    note = "Prototype of this project's Triton kernels. Dots are timings on a GPU whose all-reduce is a kernel that waits."
    return step_chart("emulated", "Emulated rank: 70B, tp 8, batch 1 on one H200", points, note)


def all_charts() -> list[Chart]:
    return [*by_batch(), by_ranks(), by_link(), by_size(), emulated_rank(), converted_layers(), quality()]
