"""``ladder bench faults``: hurt runs in every way there is, and count those that end as the documentation says."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer


def faults(
    what: Annotated[str, typer.Option(help="generate or train.")] = "generate",
    rounds: Annotated[int, typer.Option(help="Random kills.")] = 20,
    named: Annotated[
        str, typer.Option(help="Other faults, each once: all, none, or names with commas (stop,memory,link-5s,...).")
    ] = "all",
    seed: Annotated[int, typer.Option(help="Of victims and moments.")] = 0,
    timeout: Annotated[float, typer.Option(help="The runs' own --timeout.")] = 10.0,
    out: Annotated[Path | None, typer.Option(help="Write the JSON here as well.")] = None,
) -> None:
    """Kill, stop, starve and cut off ranks of real runs; the last line is the result as JSON."""
    if what not in ("generate", "train"):
        raise ValueError(f"--what {what!r}: choose generate or train")
    if rounds < 0:
        raise ValueError(f"--rounds must not be negative, got {rounds}")
    from ..environment import environment
    from .campaign import run_campaign

    with tempfile.TemporaryDirectory(prefix="ladder-faults-") as scratch:
        result = run_campaign(what, Path(scratch), rounds=rounds, named=named, seed=seed, timeout=timeout, say=_say)
    result |= environment()
    print(
        f"{result['kills_as_said']} of {result['kills']} random kills and {result['named_as_said']} of {result['named']} other "
        f"faults ended as said" + "".join(f"; {name} not tried: {why}" for name, why in result["not_tried"].items())
    )
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result))
    if result["kills_as_said"] < result["kills"] or result["named_as_said"] < result["named"]:
        raise typer.Exit(1)


def _say(row: dict[str, Any]) -> None:
    ended = f"ended after {row['ended_after_s']:.1f} s" if row["ended_after_s"] is not None else "did not end"
    verdict = "as said" if row["as_said"] else "NOT AS SAID: " + "; ".join(row["wrong"])
    print(f"{row['fault']:<20} {row['detail']:<60} {ended:<22} {verdict}", flush=True)
