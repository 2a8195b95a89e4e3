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
MORE = ("8b-tp2-prefill", "8b-tp2-e2e")
TRANSPORTS = {"symm": "symm", "nccl": "nccl, sockets"}


def pages() -> dict[str, str]:
    return {"real-ranks.md": render(read_results("engine"), read_results("train"))}


def render(engine: Mapping[str, Any], train: Mapping[str, Any]) -> str:
    decode = [engine[f"real-{name}"] for name in DECODE]
    more = [engine[f"real-{name}"] for name in MORE]
    twins = [(engine[f"real-{name}"], engine[f"emulated-{name}"]) for name in ("8b-tp2", "8b-tp4")]
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
            "Prompts and whole requests",
            "A whole request is its prompt and all its new tokens. Medians of 7 prompts and of 3 requests; a prompt's times over symmetric "
            "memory differ by less than they vary.",
            more_table(more),
            command=f"{RUN} {','.join(MORE)}",
            made=conditions(*more),
        ),
        section(
            "An emulated rank beside real ones",
            "The emulated rank runs alone on as many SMs, with all-reduces as long as the real ones; two real ranks also share the memory "
            "bandwidth. It predicts the gain to 0.03x over symmetric memory. Over sockets it promises 0.18x too much: NCCL's kernels take "
            "SMs there, and ranks wait for each other.",
            twins_table(twins),
            command=f"{RUN} emulated",
            made=conditions(*(run for pair in twins for run in pair)),
        ),
        section(
            "Training step over NCCL, two ranks",
            "Forward and backward; the gradient of an all-reduce is an all-reduce, which ladder hides as well. Ladder has two "
            "all-reduces in flight, each on a NCCL communicator of its own. Sockets take three quarters of a standard step here.",
            training_table(steps),
            command=f"{RUN} train-tp2,train-tp2-70b-bf16",
            made=f"Medians of {steps[0]['repeats']} steps; quartiles differ by up to 10 % from them. {conditions(*steps)}",
        ),
    ]
    logits = sorted((each for name, each in engine.items() if name.startswith("real-logits-")), key=lambda each: each["ranks"])
    losses = [train["train-losses"]] if "train-losses" in train else []
    if logits or losses:
        sections.append(
            section(
                "Against one process",
                "Logits of a small model, relative to float32 with every rank's shard: every wiring and schedule, batch 1, 3 and 16, both "
                "transports. Losses of 20 training steps, relative to one process.",
                agreement_table(logits, losses),
                command="python tests/gpu/test_ranks_gpu.py --out results/engine",
                made=conditions(*logits, *losses),
            )
        )
    return page("Real ranks on one GPU", ABOUT, sections)


def agreement_table(logits: Iterable[Mapping[str, Any]], losses: Iterable[Mapping[str, Any]]) -> str:
    rows = [
        (f"logits, TP={each['ranks']}", f"{each['compared']} of {each['of']} cases", f"{each['worst_relative_error']:.4f}")
        for each in logits
    ]
    for result in losses:
        for row in result["rows"]:
            name = f"losses, {row['precision']}{', compiled' if row['compiled'] else ''}"
            differences = row.get("largest_relative_difference", {})
            rows += [(name, layout, f"{worst:.1e}") for layout, worst in differences.items()] or [(name, "", "failed")]
    return table(["what", "of", "largest relative difference"], rows)


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


def more_table(results: Sequence[Mapping[str, Any]]) -> str:
    rows = []
    for result, found in cases(results):
        standard, ladder = found["standard"], found["ladder"]
        what = {
            "decode": f"decode step, context {result.get('context')}",
            "prefill": f"prompt of {result.get('prompt')}",
            "e2e": f"prompt of {result.get('prompt')}, {result.get('new')} new tokens",
        }[result["benchmark"]]
        rows.append(
            [
                f"{result['model']}, {result['layers']} layers",
                what,
                result["tp"],
                TRANSPORTS[ladder["reducer"]],
                f"{ladder['all_reduce_us']:.0f} us",
                f"{standard['ms']:.2f}",
                f"{ladder['ms']:.2f}",
                f"**{ladder['over_standard']:.2f}x**",
                f"{found['no-comm']['over_standard']:.2f}x",
            ]
        )
    columns = ["model", "batch 1", "TP", "transport", "all-reduce", "standard, ms", "ladder, ms", "ladder", "no-comm"]
    return table(columns, rows)


def twins_table(twins: Iterable[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> str:
    """Real and emulated time over standard's, by transport."""
    rows = []
    for real, emulated in twins:
        for result, found in cases([real]):
            reduced = found["ladder"]["all_reduce_us"]
            twin = {row["wiring"]: row for row in emulated["rows"] if row["link"] == f"{reduced:.1f}us,no-pdl"}
            ratios = [
                f"{each[name]['over_standard']:.2f}x"
                for name in ("ladder", "parallel")
                if name in found
                for each in (found, twin)
            ]
            transport = TRANSPORTS[found["ladder"]["reducer"]]
            milliseconds = [f"{found['standard']['ms']:.2f}", f"{twin['standard']['ms_per_token']:.2f}"]
            rows.append([result["tp"], transport, f"{reduced:.1f} us", *milliseconds, *ratios])
    columns = ["TP", "transport", "all-reduce", "standard, ms: real", "emulated", "ladder: real", "emulated"]
    return table([*columns, "parallel: real", "emulated"], rows)


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
