"""docs/results/real-ranks.md from results/engine/real-*.json and results/train/real-*.json: ranks that share one GPU."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lab.reports.sources import conditions, page, read_results, section
from ladder_residual.common.markdown import table

ABOUT = """Every rank and every all-reduce here is real: the ranks are processes that share one GPU through CUDA MPS, each with
an equal share of its SMs ([../sharing-a-gpu.md](../sharing-a-gpu.md)). They share its memory bandwidth too, so compare wirings, not
milliseconds with those of other cards. *symm* is torch symmetric memory, *nccl* is NCCL over TCP sockets (loopback)."""
RUN = "python -m lab.runs.engine_real_ranks --parts"
DECODE = ("8b-tp2", "8b-tp2-batch16", "8b-tp4")
TRANSPORTS = {"symm": "symm", "nccl": "nccl, sockets"}


def pages() -> dict[str, str]:
    return {"real-ranks.md": render(read_results("engine"), read_results("train"))}


def render(engine: Mapping[str, Any], train: Mapping[str, Any]) -> str:
    decode = [engine[f"real-{name}"] for name in DECODE]
    steps = [train[name] for name in sorted(train) if name.startswith("real-")]
    sections = [
        section(
            "Decode: Llama-3.1-8B",
            "Over sockets ladder makes a step of two ranks 1.5 to 1.7 times as fast. Over symmetric memory an all-reduce takes 5 to "
            "8 us, and ladder gets back 82 to 96 % of what standard loses to it. *Of the roofline*: of what one rank alone reads per "
            "second with its share of the SMs.",
            decode_table(decode),
            command=f"{RUN} {','.join(DECODE)}",
            made=f"Medians of the slowest rank, in turns. Context {decode[0]['context']}, random weights. {conditions(*decode)}",
        ),
        section(
            "Every wiring, batch 1",
            "Times of a decode step over that of standard. "
            "*no-comm*, the bound, is standard without the all-reduces of its layers: wrong on purpose.",
            wirings_table(decode),
            command=f"{RUN} 8b-tp2,8b-tp4",
            made=conditions(*decode),
        ),
        section(
            "Training step over NCCL, two ranks",
            "Forward and backward; the gradient of an all-reduce is an all-reduce, which ladder hides as well. Here sockets take four "
            "fifths of a standard step, so even perfect overlap would give 1.24x.",
            training_table(steps),
            command=f"{RUN} train-tp2",
            made=f"Medians of {steps[0]['repeats']} steps; quartiles differ by up to 10 % from them. {conditions(*steps)}",
        ),
    ]
    return page("Real ranks on one GPU", ABOUT, sections)


def cases(decode: Iterable[Mapping[str, Any]]) -> Iterable[tuple[Mapping[str, Any], dict[str, Mapping[str, Any]]]]:
    """Each batch and transport of each result: the result, and the rows by wiring."""
    for result in decode:
        for key in dict.fromkeys((row["batch"], row["reducer"]) for row in result["rows"]):
            yield result, {row["wiring"]: row for row in result["rows"] if (row["batch"], row["reducer"]) == key}


def decode_table(decode: Sequence[Mapping[str, Any]]) -> str:
    rows = [
        (
            result["tp"],
            found["ladder"]["batch"],
            TRANSPORTS[found["ladder"]["reducer"]],
            f"{found['ladder']['all_reduce_us']:.0f} us",
            f"{found['standard']['ms']:.2f}",
            f"{found['ladder']['ms']:.2f}",
            f"**{found['ladder']['over_standard']:.2f}x**",
            f"{found['ladder']['over_no_comm']:.2f}",
            f"{found['standard']['roofline_share']:.2f}",
            f"{found['ladder']['roofline_share']:.2f}",
        )
        for result, found in cases(decode)
    ]
    columns = ("TP", "batch", "transport", "all-reduce", "standard, ms", "ladder, ms", "ladder", "over no-comm")
    return table([*columns, "standard, of the roofline", "ladder, of the roofline"], rows)


def wirings_table(decode: Sequence[Mapping[str, Any]]) -> str:
    names = ("ladder", "delayed-1", "ladder:last-half", "parallel", "desync-2x", "no-comm")
    rows = [
        (result["tp"], TRANSPORTS[found["ladder"]["reducer"]], *(f"{found[name]['over_standard']:.2f}x" for name in names))
        for result, found in cases(decode)
        if found["ladder"]["batch"] == 1
    ]
    return table(["TP", "transport", *names], rows)


def training_table(steps: Sequence[Mapping[str, Any]]) -> str:
    rows = []
    for result in steps:
        found = {row["wiring"]: row for row in result["rows"]}
        standard, ladder = found["standard"], found["ladder"]
        rows.append(
            (
                f"{result['model']}, {result['layers']} layers, {result['dtype']}",
                f"{result['message_bytes'] / 2**20:.0f} MiB",
                *(f"{standard[key]:.0f}" for key in ("forward_ms", "backward_ms", "median_ms")),
                *(f"{ladder[key]:.0f}" for key in ("forward_ms", "backward_ms", "median_ms")),
                f"{found['no-comm']['median_ms']:.0f}",
                f"**{ladder['speedup']:.2f}x**",
            )
        )
    standard_columns = ("standard: forward, ms", "backward", "step")
    return table(
        ["model", "message", *standard_columns, "ladder: forward, ms", "backward", "step", "no-comm, step", "ladder"], rows
    )
