"""docs/results/faults.md from results/faults: killed ranks, other faults, long runs, hostile input."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lab.reports.sources import conditions, page, read_results, section
from ladder_residual.common.markdown import table


def pages() -> dict[str, str]:
    return {"faults.md": render(read_results("faults"))}


CAMPAIGNS = ("generate", "generate-gpu", "train", "train-gpu", "train-2x2", "adapt", "convert", "prepare")
COMMANDS = {
    "generate-gpu": "generate, 2 ranks share a GPU",
    "train-gpu": "train, 2 ranks share a GPU",
    "train-2x2": "train, dp 2 x tp 2",
    "adapt": "adapt, 2 ranks",
    "convert": "convert --overwrite",
    "prepare": "data prepare",
}


def render(results: Mapping[str, Any]) -> str:
    campaigns = [results[name] for name in CAMPAIGNS if name in results]
    soak, fuzz = results["soak"], results["fuzz"]
    kinds = ", ".join(f"{kind} {count}" for kind, count in fuzz.get("kinds", {}).items())
    sections = [
        section(
            "Fault injection",
            "Random kills, and other faults by name (stopped ranks, cut links, full disks, no memory, other versions). "
            "*As documented*: it ended or resumed as [../operations.md](../operations.md) says. `convert --overwrite` is killed before "
            "every change of a directory: the old or the new checkpoint is there.",
            faults_table(campaigns),
            command="python -m lab.faults --what generate --rounds 20",
            made=conditions(*campaigns),
        ),
        section(
            "Long runs",
            f"{soak['requests']:,} requests of mixed lengths on {soak['tp']} ranks. *Warm* is after the warm-up.",
            soak_table(soak),
            command="python -m lab.soak --requests 3600 --tp 2",
            made=conditions(soak),
        ),
        section(
            "Hostile input",
            f"{fuzz['inputs']:,} mutated inputs, each limited to {fuzz['bound_seconds']:g} s of processor time and "
            f"{fuzz['bound_memory_bytes'] / 2**30:g} GiB: the slowest took {fuzz['slowest']['seconds']:.1f} s, memory grew by "
            f"{fuzz['memory_grown_bytes'] / 2**20:.0f} MiB at most. *Unexpected* is a crash, a hang, any error but the one line users see"
            f"{f', a changed file outside, or something else computed than the files say ({kinds})' if kinds else ''}.",
            table(
                ["input", "accepted", "refused", "unexpected"],
                [[row[key] for key in ("target", "accepted", "refused", "unexpected")] for row in fuzz["rows"]],
            ),
            command=f"python -m lab.fuzz --inputs {fuzz['inputs']}",
            made=conditions(fuzz),
        ),
    ]
    if load := results.get("load"):
        sections.append(
            section(
                "What the check for NaN costs",
                f"Processor time on one thread, medians of {load['rounds']} by turns. A load maps the file and reads nothing, so beside "
                "`load_model` alone the whole check shows; a command waits for its first token.",
                load_table(load),
                command=f"python -m lab.load_cost --rounds {load['rounds']}",
                made=conditions(load),
            )
        )
    about = "The guides are [../operations.md](../operations.md) and [../security.md](../security.md)."
    return page("Faults, long runs, hostile input", about, sections)


def faults_table(campaigns: list[Mapping[str, Any]]) -> str:
    rows = [
        [
            COMMANDS.get(run["what"], run["what"]),
            f"{run['kills_as_documented']} of {run['kills']}",
            f"{run['named_as_documented']} of {run['named']}" if run["named"] else "",
            f"{run['slowest_end_s']:.0f}",
        ]
        for run in campaigns
    ]
    return table(["command", "random kills as documented", "other faults as documented", "slowest end, s"], rows)


def load_table(load: Mapping[str, Any]) -> str:
    rows = [
        [
            row["what"],
            f"{row['dtype']}, {row['bytes'] / 2**20:.0f} MiB",
            *(f"{1e3 * row[key]:.0f}" for key in ("unchecked_s", "checked_s")),
            f"{row['cost_percent']:+.1f} %",
        ]
        for row in load["rows"]
    ]
    return table(["what", "checkpoint", "without, ms", "with, ms", "cost"], rows)


def soak_table(soak: Mapping[str, Any]) -> str:
    rows = [
        [
            row["rank"],
            *(f"{row[f'memory_bytes_{when}'] / 2**20:.0f}" for when in ("warm", "end")),
            *(row[f"{what}_{when}"] for what in ("files", "threads") for when in ("warm", "end")),
        ]
        for row in soak["rows"]
    ]
    return table(["rank", "MiB, warm", "MiB, end", "files, warm", "files, end", "threads, warm", "threads, end"], rows)
