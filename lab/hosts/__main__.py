"""Decode and prefill steps of all wirings across several hosts on this machine (network namespaces, needs root).

python -m lab.hosts --hosts 2 --delay 1ms --rate 1gbit
python -m lab.hosts --links four
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from lab.hosts.links import FOUR_LINKS, NetworkShape, parse_links
from lab.output import finish
from ladder_residual.cli.options import (
    CommDtype,
    Dtype,
    Layers,
    Repeats,
    Shape,
    SmallAllreduce,
    Uneven,
    Wirings,
    split_wirings,
)
from ladder_residual.distributed.launch import run_command

WIRINGS = "standard,ladder:last-half,ladder,parallel,desync-2x"
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def hosts(
    delay: Annotated[str, typer.Option(help="One way, e.g. 1ms.")] = "1ms",
    rate: Annotated[str | None, typer.Option(help="Out of each host, as tc writes it, e.g. 1gbit.")] = None,
    links: Annotated[
        str | None, typer.Option(help=f"Several links in turn instead, e.g. {FOUR_LINKS}, which 'four' stands for.")
    ] = None,
    number: Annotated[int, typer.Option("--hosts", help="Hosts, one rank each.")] = 2,
    model: Shape = "ladder-1b",
    layers: Layers = None,
    dtype: Dtype = "float32",
    uneven: Uneven = False,
    wirings: Wirings = WIRINGS,
    phases: Annotated[str, typer.Option(help="decode, prefill or both with a comma.")] = "decode,prefill",
    batch: Annotated[int, typer.Option(help="Sequences of a decode step.")] = 1,
    prompt: Annotated[int, typer.Option(help="Tokens of context of a decode step.")] = 16,
    prefill_batch: Annotated[int, typer.Option(help="Sequences of a prefill step.")] = 1,
    prefill_prompt: Annotated[int, typer.Option(help="Tokens of each of them.")] = 64,
    repeats: Repeats = 20,
    comm_dtype: CommDtype = "same",
    small_allreduce: SmallAllreduce = "fixed",
    out: Annotated[Path | None, typer.Option(help="Write the JSON here as well.")] = None,
) -> None:
    """Decode and prefill steps of all wirings, across hosts with a slow link between them, in one run."""
    text = f"{delay}/{rate}" if rate else delay
    chosen = parse_links(FOUR_LINKS if links == "four" else links) if links else [NetworkShape.parse(text)]
    names = split_wirings(wirings)
    asked = [part.strip() for part in phases.split(",")]
    if not asked or not set(asked) <= {"decode", "prefill"}:
        raise ValueError(f"--phases {phases!r}: choose decode, prefill or both with a comma")
    from lab.hosts.namespaces import bench_hosts
    from lab.reports.hosts import links_table, phase_table

    options = {
        "source": model,
        "layers": layers,
        "dtype": dtype,
        "uneven": uneven,
        "wirings": names,
        "decode": [batch, prompt] if "decode" in asked else None,
        "prefill": [prefill_batch, prefill_prompt] if "prefill" in asked else None,
        "repeats": repeats,
        "comm_dtype": comm_dtype,
        "small_allreduce": small_allreduce,
    }
    result = bench_hosts(
        chosen, ["-m", "lab.hosts.ranks", json.dumps(options)], hosts=number, say=lambda line: print(line, flush=True)
    )
    print(links_table(result))
    if "ladder" in names:
        for phase in asked:
            print(phase_table(result, phase))
    finish(result, out)


if __name__ == "__main__":
    run_command(app)
