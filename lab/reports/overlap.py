"""docs/results/overlap.md from results/overlap."""

from __future__ import annotations

from typing import Any

from lab.reports.sources import page, read_results, section
from ladder_residual.bench.overlap import COMPUTE
from ladder_residual.common.markdown import table

COMMAND = (
    "ladder bench overlap --model ladder-1b --layers 8 --batch 8 --latency 3ms "
    "--wirings standard,ladder:last-half,ladder --repeats 40"
)


def pages() -> dict[str, str]:
    results = read_results("overlap")
    reading = (
        "Decode of a Llama-shaped model of 8 layers, two processes on one host. Only the latency of the link is emulated; "
        "ranks, sockets and compute are real."
    )
    sections = [
        section(f"Decode, {stem}", reading, markdown_table(result), command=COMMAND) for stem, result in results.items()
    ]
    return {"overlap.md": page("Overlap on CPU ranks", "The guide is [../benchmarks.md](../benchmarks.md).", sections)}


def markdown_table(result: dict[str, Any]) -> str:
    """The rows of a result."""
    rows = []
    for row in result["rows"]:
        name = "no communication (bound)" if row["wiring"] == COMPUTE else row["wiring"]
        step = f"{row['median_ms']:.1f} ({row['p25_ms']:.1f}-{row['p75_ms']:.1f})"
        hidden = "" if row["wiring"] in ("standard", COMPUTE) else f"{row['hidden_percent']:.0f} %"
        rows.append((name, step, f"{row['tokens_per_s']:.1f}", f"{row['speedup']:.2f}x", hidden))
    return (
        table(("wiring", "ms per step", "tokens/s", "speed-up", "communication hidden"), rows)
        + f"\n{result['date']}, {result['machine']}, {result['link']}, torch {result['torch']}; "
        f"compute {result['compute_ms']:.1f} ms, communication {result['communication_ms']:.1f} ms a step.\n"
    )
