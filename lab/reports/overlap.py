"""docs/results/overlap.md from results/overlap."""

from __future__ import annotations

from lab.reports.sources import page, read_results, section
from ladder_residual.bench.overlap import markdown_table

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
