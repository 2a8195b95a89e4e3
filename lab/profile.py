"""Where the time of a decode step goes: when each kernel of a layer begins and ends, beside the time its weights take to be read.

    python -m lab.profile --model llama-3-70b --tp 8

Kernels are launched early (PDL), so a kernel's bar begins before its work does: what it adds to a layer is the time from the end of the
one before it to its own. The profiler itself costs a little.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Annotated, Any

import typer

from lab.output import finish
from ladder_residual.bench.roofline import read_bandwidth
from ladder_residual.cli.options import Layers
from ladder_residual.common.environment import environment
from ladder_residual.distributed.launch import run_command
from ladder_residual.engine.random_rank import RandomRank
from ladder_residual.engine.spec import RankSizes
from ladder_residual.links import parse_link
from ladder_residual.plan.models import resolve_model
from ladder_residual.trace.engine import ALL_REDUCE, ATTENTION, READS_STREAM, Kernel, profile_step

WRITES_PARTIAL, MERGES = "gemv", "merge_splits"
SKIPPED = 8  # layers at either end, where the embedding and the head are near
CASES = (
    ("standard", "none", "serial"),
    ("ladder", "none", "interleaved"),
    ("ladder", "5us", "interleaved"),
    ("ladder", "24us", "serial"),
)

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def profile(
    model: Annotated[str, typer.Option(help="A published shape (random weights).")] = "llama-3-70b",
    layers: Layers = None,
    tp: Annotated[int, typer.Option("--tp", help="This GPU holds one rank of so many.")] = 8,
    context: Annotated[int, typer.Option(help="Tokens in the cache.")] = 1280,
    out: Annotated[Path | None, typer.Option(help="Write the JSON here as well.")] = None,
) -> None:
    """Time the kernels of a layer under torch.profiler, for standard and ladder; needs a GPU."""
    result = bench_profile(rank=RandomRank(*resolve_model(model), tp, layers=layers), context=context)
    for row in result["rows"]:
        print(json.dumps(row))
    finish(result, out)


def bench_profile(
    *, rank: RandomRank, cases: Sequence[tuple[str, str, str]] = CASES, context: int = 1280
) -> dict[str, Any]:  # fmt: skip
    """One sequence; ``cases`` are wirings with their links and schedules (not two streams, whose kernels have no one order)."""
    bandwidth = read_bandwidth()
    # All are made first: a profiler, once on, slows down what comes after it, and with it what an engine times to choose its tiles.
    engines = [
        rank.engine(wiring, parse_link(link, tp=rank.tp), batch=1, max_context=2 * context, schedule=schedule)
        for wiring, link, schedule in cases
    ]
    rows = [
        {"wiring": wiring, "link": link, "schedule": schedule, **row}
        for (wiring, link, schedule), engine in zip(cases, engines, strict=True)
        for row in rows_of_layer(profile_step(engine, context), rank.sizes, bandwidth)
    ]
    return {
        "benchmark": "profile", "emulated": rank.tp > 1, "model": rank.name, "tp": rank.tp, "layers": rank.sizes.layers,
        "context": context, "read_bandwidth_tb_s": round(bandwidth / 1e12, 3), "rows": rows, **environment(),
    }  # fmt: skip


def rows_of_layer(kernels: Sequence[Kernel], sizes: RankSizes, bandwidth: float) -> list[dict[str, Any]]:
    """The kernels of a layer in the order they end, microseconds from the end of the layer before (its down projection), mean of all layers
    but some at the ends."""
    by_start = sorted(kernels, key=lambda kernel: kernel.start)

    def of(*prefixes: str) -> list[Kernel]:
        return [kernel for kernel in by_start if kernel.name.startswith(prefixes)]

    read, written, reduces = (
        of(*READS_STREAM),
        of(WRITES_PARTIAL),
        of(ALL_REDUCE)[1:],
    )  # the first all-reduce is the embedding's
    found = {
        "QKV": read[0::2], "gate/up": read[1::2], "output": written[0::2], "down": written[1::2], "attention": of(ATTENTION),
        "merge of splits": of(MERGES), "attention all-reduce": reduces[0::2], "MLP all-reduce": reduces[1::2],
    }  # fmt: skip
    h, f = sizes.hidden, sizes.intermediate
    weights = {"QKV": sizes.qkv_width * h, "output": sizes.heads * sizes.head_dim * h, "gate/up": 2 * f * h, "down": f * h}
    skipped = min(SKIPPED, sizes.layers // 3)
    layers = range(skipped + 1, sizes.layers - skipped)

    def from_the_layer_before(name: str, field: str) -> float:
        return round(mean(getattr(found[name][layer], field) - found["down"][layer - 1].end for layer in layers), 2)

    rows = [
        {
            "kernel": name,
            "begins_us": from_the_layer_before(name, "start"),
            "ends_us": from_the_layer_before(name, "end"),
            **({"reading_us": round(2e6 * weights[name] / bandwidth, 2)} if name in weights else {}),
        }
        for name in found
        if found[name]
    ]
    return sorted(rows, key=lambda row: row["ends_us"])


if __name__ == "__main__":
    run_command(app)
