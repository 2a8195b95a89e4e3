"""docs/results/faults.md from results/faults: killed ranks, other faults, long runs, hostile input."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lab.reports.sources import conditions, page, read_results, section
from ladder_residual.common.markdown import table


def pages() -> dict[str, str]:
    return {"faults.md": render(read_results("faults"))}


def render(results: Mapping[str, Any]) -> str:
    campaigns, soak, fuzz = [results["generate"], results["train"]], results["soak"], results["fuzz"]
    sections = [
        section(
            "Fault injection",
            "Random kills, and other faults by name (stopped ranks, cut links, full disks, no memory, other versions). "
            "*As documented*: it ended or resumed as [../operations.md](../operations.md) says.",
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
            f"{fuzz['bound_memory_bytes'] / 2**30:g} GiB. *Unexpected* is a crash, a hang, or any error but the one line "
            "users see.",
            table(
                ["input", "accepted", "refused", "unexpected"],
                [[row[key] for key in ("target", "accepted", "refused", "unexpected")] for row in fuzz["rows"]],
            ),
            command="python -m lab.fuzz --inputs 10000",
            made=conditions(fuzz),
        ),
    ]
    about = "The guides are [../operations.md](../operations.md) and [../security.md](../security.md)."
    return page("Faults, long runs, hostile input", about, sections)


def faults_table(campaigns: list[Mapping[str, Any]]) -> str:
    rows = [
        [
            run["what"],
            f"{run['kills_as_documented']} of {run['kills']}",
            f"{run['named_as_documented']} of {run['named']}",
            f"{run['slowest_end_s']:.0f}",
        ]
        for run in campaigns
    ]
    return table(["command", "random kills as documented", "other faults as documented", "slowest end, s"], rows)


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
