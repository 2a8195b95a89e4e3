"""Where the time of a decode step goes: when each kernel of a layer begins and ends, beside the time its weights take to be read.

Early launches stay on, so a kernel's bar begins before its work does: what it adds to a layer is the time from the end of the one
before it to its own. The profiler itself costs a little.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean
from typing import Any

from ..engine.emulate import parse_link
from ..engine.roofline import read_bandwidth
from ..engine.spec import RankSizes
from ..trace_engine import ATTENDS, READS_STREAM, SUM, Kernel, profile_step
from .environment import environment
from .gpu import Shard

WRITES_MESSAGE, MERGES = "output_project", "merge_splits"
SKIPPED = 8  # layers at either end, where the embedding and the head are near
CASES = (("standard", "none", "one"), ("ladder", "none", "woven"), ("ladder", "5us", "woven"), ("ladder", "24us", "one"))


def bench_profile(
    *, shard: Shard, cases: Sequence[tuple[str, str, str]] = CASES, context: int = 1280
) -> dict[str, Any]:  # fmt: skip
    """One sequence; ``cases`` are wirings with their links and schedules (not two lanes, whose kernels have no one order)."""
    bandwidth = read_bandwidth()
    # All are made first: a profiler, once on, slows down what comes after it, and with it what an engine times to choose its tiles.
    engines = [
        shard.engine(wiring, parse_link(link, tp=shard.tp), batch=1, max_context=2 * context, schedule=schedule)
        for wiring, link, schedule in cases
    ]
    rows = [
        {"wiring": wiring, "link": link, "schedule": schedule, **row}
        for (wiring, link, schedule), engine in zip(cases, engines, strict=True)
        for row in rows_of_layer(profile_step(engine, context), shard.sizes, bandwidth)
    ]
    return {
        "benchmark": "profile", "emulated": shard.tp > 1, "model": shard.name, "tp": shard.tp, "layers": shard.sizes.layers,
        "context": context, "read_bandwidth_tb_s": round(bandwidth / 1e12, 3), "rows": rows, **environment(),
    }  # fmt: skip


def rows_of_layer(kernels: Sequence[Kernel], sizes: RankSizes, bandwidth: float) -> list[dict[str, Any]]:
    """The kernels of a layer in the order they end, microseconds from the end of the layer before (its down product), mean of all layers
    but some at the ends."""
    by_start = sorted(kernels, key=lambda kernel: kernel.start)

    def of(*prefixes: str) -> list[Kernel]:
        return [kernel for kernel in by_start if kernel.name.startswith(prefixes)]

    read, written, sums = of(*READS_STREAM), of(WRITES_MESSAGE), of(SUM)[1:]  # the first sum is the embedding's
    found = {
        "QKV": read[0::2], "gate/up": read[1::2], "output": written[0::2], "down": written[1::2], "attention": of(ATTENDS),
        "merge of splits": of(MERGES), "sum of attention": sums[0::2], "sum of MLP": sums[1::2],
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
