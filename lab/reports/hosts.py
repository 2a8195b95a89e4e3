"""docs/results/hosts.md from results/hosts: wirings by links, and what an all-reduce costs each way it can be done."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lab.reports.sources import conditions, page, read_results, section
from ladder_residual.common.markdown import table

ABOUT = """Every host is a network namespace with an address of its own, torchrun runs
on each, and the wirings of a row are measured alternately in one run. *Hidden* is the share of what standard spends beyond compute
that ladder does not. parallel runs with the same weights and one norm less, so only its speed means something here. The guide is
[../hosts.md](../hosts.md)."""
NAMES = {"no-comm": "no communication", "ladder:last-half": "ladder, upper half"}
WAYS = ("sockets", "sockets_bf16", "gloo")  # of all-reducing between CPU ranks
PROBED = (16_384, 262_144, 1_048_576)  # bytes shown
READINGS = {
    "smollm2-135m-batch8": "The slower the link, the more ladder gains. At 2 ms its all-reduces take longer than the modules beside them.",
    "random-0.5b-batch1": "Larger modules hide more of the same link. At 0.1 ms there is little to hide, and all wirings are level.",
}
COMMANDS = {
    "smollm2-135m-batch8": "--links four --model smollm2 --uneven --batch 8 --repeats 12",
    "random-0.5b-batch1": "--links four --model ladder-1b --layers 12 --dtype bfloat16 --repeats 10",
}
OTHERS = ("ladder:last-half", "parallel", "desync-2x", "no-comm")


def pages() -> dict[str, str]:
    return {"hosts.md": render(read_results("hosts"))}


def render(results: Mapping[str, Any]) -> str:
    sections = [_section(stem, results[stem]) for stem in COMMANDS]
    probed = results["smollm2-135m-batch8"]
    reading = (
        "Up to 1 MB between two hosts, partials gathered over sockets and added locally (one trip) are faster than gloo's "
        "all-reduce (two trips). bfloat16 halves the bytes."
    )
    table_of_probes = probe_table([(link["link"], link["link_probe"]) for link in probed["links"]])
    sections.append(section("One all-reduce, each way", reading, table_of_probes, command="ladder bench link --tp 2"))
    return page("Across hosts, over slow links", ABOUT, sections)


def _section(stem: str, result: Mapping[str, Any]) -> str:
    weights = "real weights" if result["weights"] == "checkpoint" else "random weights"
    title = (
        f"{result['model']}, {result['parameters'] / 1e6:.0f}M parameters, {result['layers']} layers, {result['hosts']} hosts, "
        f"batch {_batch(result)}"
    )
    made = f"Median (quartiles), {weights}, {result['dtype']}, one rank a host. {conditions(result)}"
    return section(title, READINGS[stem], wirings_table(result), command=f"python -m lab.hosts {COMMANDS[stem]}", made=made)


def wirings_table(result: Mapping[str, Any]) -> str:
    """A row for each phase and link: standard, ladder, and what the others gain."""
    rows = {(row["phase"], row["link"], row["wiring"]): row for row in result["rows"]}
    lines = []
    for phase, link in dict.fromkeys(key[:2] for key in rows):
        standard, ladder = rows[phase, link, "standard"], rows[phase, link, "ladder"]
        others = [f"{rows[phase, link, wiring]['speedup']:.2f}x" for wiring in OTHERS]
        times = [f"{row['median_ms']:.1f} ({row['p25_ms']:.1f}-{row['p75_ms']:.1f})" for row in (standard, ladder)]
        hidden = None if ladder["hidden_percent"] is None else f"{ladder['hidden_percent']:.0f} %"
        lines.append([phase, link, *times, f"**{ladder['speedup']:.2f}x**", hidden, *others])
    names = [NAMES.get(wiring, wiring) for wiring in OTHERS]
    return table(["phase", "link", "standard, ms", "ladder, ms", "ladder", "hidden", *names], lines)


def _batch(result: Mapping[str, Any]) -> int:
    return int(result["links"][0]["phases"][0]["batch"])


def phase_table(result: Mapping[str, Any], phase: str) -> str:
    """One phase: links down, wirings across."""
    rows = {(row["link"], row["wiring"]): row for row in result["rows"] if row["phase"] == phase}
    wirings = list(dict.fromkeys(wiring for _, wiring in rows))
    lines, first = [], None
    for link in result["links"]:
        times = next(part for part in link["phases"] if part["phase"] == phase)
        first = first or times
        cells = [link["link"], f"{times['compute_ms']:.1f}", f"{times['communication_ms']:.1f}"]
        for wiring in wirings:
            row = rows[link["link"], wiring]
            gain = "" if wiring in ("standard", "no-comm") else f" **{row['speedup']:.2f}x**"
            cells.append(f"{row['median_ms']:.1f} ({row['p25_ms']:.1f}-{row['p75_ms']:.1f}){gain}")
        ladder = rows[link["link"], "ladder"]
        hidden = ladder["hidden_percent"]
        lines.append([*cells, f"{ladder['over_bound']:.2f}", None if hidden is None else f"{hidden:.0f} %"])
    assert first is not None
    tokens = "prompt tokens" if phase == "prefill" else "tokens of context"
    what = f"{first['batch']} x {first['prompt']} {tokens}"
    size = f"{first['all_reduces_per_step']} all-reduces of {first['message_bytes'] / 1024:.0f} KiB"
    names = [NAMES.get(wiring, wiring) for wiring in wirings]
    made = table(["link", "compute", "communication", *names, "ladder / bound", "hidden"], lines)
    return f"**{phase}** ({what}; {size}), ms per step: median (quartiles) and speed-up over standard\n\n{made}"


def probe_table(probes: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    """Milliseconds of one all-reduce by size, over each link."""
    rows = [
        [name, f"{row['bytes'] >> 10} KiB", *(f"{1e3 * row[way]:.2f}" for way in WAYS)]
        for name, probe in probes
        for row in probe["rows"]
        if row["bytes"] in PROBED
    ]
    return table(["link", "message", "sockets, ms", "sockets in bfloat16, ms", "gloo, ms"], rows)


def links_table(result: Mapping[str, Any]) -> str:
    rows = [
        [
            link["link"],
            f"{link['rtt_ms']:.2f}",
            f"{link['wire_adds_ms']:.3f}",
            f"{link['bandwidth_mbit_s']:.0f}",
            link["wire"],
            f"{link['wire_cpu_percent']:.0f} %",
            f"{link['load_before']:.1f}",
        ]
        for link in result["links"]
    ]
    return table(["link", "round trip, ms", "wire adds each way, ms", "Mbit/s", "wire", "of one core", "load before"], rows)
