"""``ladder bench hosts``, ``hosts-report`` and ``link``: parse, call, print."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from ...launch import on_ranks
from ..commands import Device, Layers, Ranks, Repeats, Shape, Wirings, split_wirings
from .links import FOUR_LINKS, Link, parse_links

Wire = Annotated[str, typer.Option(help="How partial sums travel: same (as they are) or bf16 (rounded; half of float32).")]
Exchange = Annotated[
    str, typer.Option(help="Which sums are exchanged whole: fixed (by size) or measured (by size and this link, at start).")
]
Context = Annotated[int, typer.Option(help="Tokens of context of a decode step.")]
WIRINGS = "standard,ladder:last-half,ladder,parallel,desync-2x"


def hosts(
    delay: Annotated[str, typer.Option(help="One way, e.g. 1ms.")] = "1ms",
    rate: Annotated[str | None, typer.Option(help="Out of each host, as tc writes it, e.g. 1gbit.")] = None,
    links: Annotated[
        str | None, typer.Option(help=f"Several links in turn instead, e.g. {FOUR_LINKS}, which 'four' stands for.")
    ] = None,
    number: Annotated[int, typer.Option("--hosts", help="Hosts, one rank each.")] = 2,
    model: Shape = "ladder-1b",
    layers: Layers = None,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16; auto: as a checkpoint is stored.")] = "float32",
    uneven: Annotated[bool, typer.Option("--uneven", help="Allow ranks with unequal numbers of heads.")] = False,
    wirings: Wirings = WIRINGS,
    phases: Annotated[str, typer.Option(help="decode, prefill or both with a comma.")] = "decode,prefill",
    batch: Annotated[int, typer.Option(help="Sequences of a decode step.")] = 1,
    prompt: Context = 16,
    prefill_batch: Annotated[int, typer.Option(help="Sequences of a prefill step.")] = 1,
    prefill_prompt: Annotated[int, typer.Option(help="Tokens of each of them.")] = 64,
    repeats: Repeats = 20,
    wire: Wire = "same",
    exchange: Exchange = "fixed",
    out: Annotated[Path | None, typer.Option(help="Write the JSON here as well.")] = None,
) -> None:
    """Several hosts on this machine (network namespaces, needs root) with a slow link between them; all wirings in one run."""
    text = f"{delay}/{rate}" if rate else delay
    chosen = parse_links(FOUR_LINKS if links == "four" else links) if links else [Link.parse(text)]
    names = split_wirings(wirings)
    asked = [part.strip() for part in phases.split(",")]
    if not asked or not set(asked) <= {"decode", "prefill"}:
        raise ValueError(f"--phases {phases!r}: choose decode, prefill or both with a comma")
    from .laboratory import bench_hosts

    arguments = ["bench", "hosts-ranks", "--model", model, "--wirings", ",".join(names), "--phases", ",".join(asked)]
    arguments += ["--batch", str(batch), "--prompt", str(prompt), "--prefill-batch", str(prefill_batch)]
    arguments += ["--prefill-prompt", str(prefill_prompt), "--repeats", str(repeats), "--dtype", dtype, "--wire", wire]
    arguments += ["--exchange", exchange, *(["--layers", str(layers)] if layers else []), *(["--uneven"] if uneven else [])]
    result = bench_hosts(chosen, arguments, hosts=number, say=lambda line: print(line, flush=True))
    from .report import section

    print(section(result))
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result))


def hosts_ranks(
    model: Shape,
    wirings: Wirings,
    phases: Annotated[str, typer.Option()],
    batch: Annotated[int, typer.Option()],
    prompt: Annotated[int, typer.Option()],
    prefill_batch: Annotated[int, typer.Option()],
    prefill_prompt: Annotated[int, typer.Option()],
    repeats: Repeats,
    dtype: Annotated[str, typer.Option()],
    wire: Wire,
    exchange: Exchange,
    layers: Layers = None,
    uneven: Annotated[bool, typer.Option("--uneven")] = False,
) -> None:
    """One host's rank of ``ladder bench hosts`` (started by it)."""
    from ...parallel import distributed
    from .ranks import measure_on_ranks

    options: dict[str, Any] = {"layers": layers, "dtype": dtype, "uneven": uneven, "wire": wire, "exchange": exchange}
    with distributed("cpu") as world:
        result = measure_on_ranks(
            world,
            source=model,
            wirings=split_wirings(wirings),
            decode=(batch, prompt) if "decode" in phases else None,
            prefill=(prefill_batch, prefill_prompt) if "prefill" in phases else None,
            repeats=repeats,
            **options,
        )
        if world.is_main:
            print(json.dumps(result))


def hosts_report(
    results: Annotated[Path, typer.Argument(help="Directory of files that `ladder bench hosts --out` wrote.")] = Path(
        "results/hosts"
    ),
    out: Annotated[Path | None, typer.Option(help="The page to write; default: standard output.")] = None,
) -> None:
    """The tables of docs/hosts.md, made from results."""
    from .report import page

    if not results.is_dir():
        raise ValueError(f"there is no directory {results}")
    text = page([json.loads(path.read_text(encoding="utf-8")) for path in sorted(results.glob("*.json"))])
    if out is None:
        print(text, end="")
    else:
        out.write_text(text, encoding="utf-8")


def link(tp: Ranks = 2, device: Device = "cpu") -> None:
    """One sum between CPU ranks, each way it can travel: exchanged over sockets, exchanged as bfloat16, all-reduced by gloo."""
    on_ranks(tp)
    from ...link_probe import probe_link
    from ...parallel import distributed
    from ..environment import environment
    from .report import sums_table

    with distributed(device) as world:
        found = probe_link(world).to_dict()
        if world.is_main:
            print(sums_table([("this link", found)]))
            print(json.dumps({"benchmark": "link", "tp": world.size, **found, **environment()}))
