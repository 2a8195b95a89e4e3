"""Results of ``ladder bench hosts`` as Markdown: wirings by links, and what a sum costs each way it can travel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_EXPLAINED = """\
Each result was made by `ladder bench hosts` (`docs/operations.md` has the commands). Every host is a network
namespace with an address of its own, torchrun runs on each, and all wirings of a row were measured in one run, turn by turn.
*Compute* is the step without sums (the ranks choose the next token together in it, as in every other wiring), *communication*
the step's sums one after another, the *bound* the larger of the two; *hidden* is the share of what standard spends beyond compute
that ladder does not. parallel runs with the same weights and one norm less: only its speed means something here. The *load before* a run
is the system's average over a minute, in which the link measured before has its part.

The bound is out of reach where compute and communication are about equal: a sum has the time of the *next* module to travel in, and
modules are not equally long. What hides under a long MLP sticks out beside a short attention."""
_SUMS_EXPLAINED = """\
Median milliseconds of one sum between the hosts: partials exchanged whole over sockets and added locally (one trip), the same
with partials rounded to bfloat16, and gloo's all-reduce (two trips). *Exchanged below* is what `--exchange measured` chooses."""
_NAMES = {"no-comm": "no communication", "ladder:last-half": "ladder, upper half"}


def section(result: dict[str, Any]) -> str:
    """One result: a table per phase, links down, wirings across."""
    weights = "real weights" if result["weights"] == "checkpoint" else "random weights"
    travel = f", sums travel as {result['partials_travel_as']}" if result["partials_travel_as"] != result["dtype"] else ""
    lines = [
        f"## {result['model']}, {result['parameters'] / 1e6:.0f}M parameters, {result['hosts']} hosts{travel}",
        "",
        f"{weights}, {result['dtype']}, {result['layers']} layers, one rank a host{', uneven heads' if result['uneven'] else ''}; "
        f"{result['machine']}, torch {result['torch']}, transformers {result['transformers']}, {result['date']}, "
        f"commit {result['commit']}.",
        "",
    ]
    for phase in dict.fromkeys(row["phase"] for row in result["rows"]):
        lines += [*_phase_table(result, phase), ""]
    return "\n".join(lines)


def _phase_table(result: dict[str, Any], phase: str) -> list[str]:
    rows = [row for row in result["rows"] if row["phase"] == phase]
    wirings = list(dict.fromkeys(row["wiring"] for row in rows))
    first = next(part for part in result["links"][0]["phases"] if part["phase"] == phase)
    what = (
        f"{first['batch']} x {first['prompt']} tokens read"
        if phase == "prefill"
        else (f"{first['batch']} sequences, one token each, after {first['prompt']}")
    )
    lines = [
        f"**{phase}** ({what}; {first['sums_per_step']} sums of {first['message_bytes'] / 1024:.0f} KiB), ms per step, median (quartiles), "
        f"speed-up over standard:",
        "",
        "| link | compute | communication | "
        + " | ".join(_NAMES.get(name, name) for name in wirings)
        + " | ladder / bound | hidden |",
        "|---" * (len(wirings) + 5) + "|",
    ]
    for part in result["links"]:
        times = next(one for one in part["phases"] if one["phase"] == phase)
        cells = []
        for name in wirings:
            row = next(row for row in rows if row["link"] == part["link"] and row["wiring"] == name)
            gain = "" if name in ("standard", "no-comm") else f" **{row['speedup']:.2f}x**"
            cells.append(f"{row['median_ms']:.1f} ({row['p25_ms']:.1f}-{row['p75_ms']:.1f}){gain}")
        ladder = next((row for row in rows if row["link"] == part["link"] and row["wiring"] == "ladder"), None)
        over = f"{ladder['over_bound']:.2f}" if ladder else ""
        hidden = f"{ladder['hidden_percent']:.0f} %" if ladder and ladder["hidden_percent"] is not None else ""
        lines.append(
            f"| {part['link']} | {times['compute_ms']:.1f} | {times['communication_ms']:.1f} | {' | '.join(cells)} | {over} | {hidden} |"
        )
    return lines


def sums_table(probes: Sequence[tuple[str, dict[str, Any]]]) -> str:
    """Milliseconds of one sum by size, over each link: exchange, exchange as bfloat16, all-reduce."""
    lines = [
        "| link | bytes | exchange, ms | exchange as bf16 | gloo's all-reduce | exchanged below |",
        "|---|---|---|---|---|---|",
    ]
    for name, probe in probes:
        for row in probe["rows"]:
            lines.append(
                f"| {name} | {row['bytes']:,} | {1e3 * row['exchange']:.2f} | {1e3 * row['exchange_bf16']:.2f} | "
                f"{1e3 * row['all_reduce']:.2f} | {probe['exchange_below']:,} |"
            )
    return "\n".join(lines)


def links_table(result: dict[str, Any]) -> list[str]:
    lines = [
        "| link | round trip, ms | wire adds each way | measured, Mbit/s | wire | of one core | load before |",
        "|---|---|---|---|---|---|---|",
    ]
    for part in result["links"]:
        lines.append(
            f"| {part['link']} | {part['rtt_ms']:.2f} | {part['wire_adds_ms']:.3f} | {part['bandwidth_mbit_s']:.0f} | {part['wire']} | "
            f"{part['wire_cpu_percent']:.0f} % | {part['load_before']:.1f} |"
        )
    return lines


def page(results: Sequence[dict[str, Any]]) -> str:
    """``docs/hosts.md``."""
    lines = [
        "# Across hosts, over slow links",
        "",
        "Generated by `ladder bench hosts-report results/hosts --out docs/hosts.md`; do not edit by hand.",
        "",
        *_EXPLAINED.splitlines(),
        "",
    ]
    if not results:
        return "\n".join([*lines, "No result has been recorded yet.", ""])
    for result in results:
        lines += [section(result), *links_table(result), ""]
    lines += [
        "## One sum, each way it can travel",
        "",
        *_SUMS_EXPLAINED.splitlines(),
        "",
        sums_table([(part["link"], part["sums"]) for part in results[0]["links"]]),
        "",
    ]
    return "\n".join(lines)
