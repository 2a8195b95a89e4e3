"""Inject faults into real runs and count those that end as documented.

python -m lab.faults --what generate --rounds 20
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from lab.output import finish
from ladder_residual.distributed.launch import run_command

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def faults(
    what: Annotated[
        str, typer.Option(help="generate, generate-gpu, train, train-gpu, train-2x2, adapt, convert or prepare.")
    ] = "generate",
    rounds: Annotated[int, typer.Option(help="Random kills; convert is killed at every change of a directory.")] = 20,
    named: Annotated[
        str, typer.Option(help="Other faults, each once: all, none, or names with commas (stop,memory,link-5s,...).")
    ] = "all",
    seed: Annotated[int, typer.Option(help="Of victims and moments.")] = 0,
    timeout: Annotated[float, typer.Option(help="--timeout of the runs.")] = 10.0,
    jobs: Annotated[
        int, typer.Option(help="Campaigns at a time that share out the random kills; more than one tries no other faults.")
    ] = 1,
    seconds: Annotated[float | None, typer.Option(help="After which no other random kill begins.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write the JSON here as well.")] = None,
) -> None:
    """Kill, stop, starve and cut off ranks of real runs; the last line is the result as JSON."""
    from lab.faults.campaign import CAMPAIGNS, WRITERS, run_campaign, run_kills_in_parallel

    if what not in CAMPAIGNS:
        raise ValueError(f"--what {what!r}: choose from {', '.join(CAMPAIGNS)}")
    if rounds < 0:
        raise ValueError(f"--rounds must not be negative, got {rounds}")
    if jobs < 1 or (jobs > 1 and (jobs > rounds or what in WRITERS)):
        raise ValueError(
            f"--jobs {jobs}: between 1 and --rounds ({rounds}), and 1 for {' and '.join(WRITERS)}, whose moments are counted"
        )
    if seconds is not None and jobs > 1:
        raise ValueError(f"--seconds {seconds:g} bounds one campaign: run with --jobs 1 (got {jobs})")
    from ladder_residual.common.environment import environment

    with tempfile.TemporaryDirectory(prefix="ladder-faults-") as scratch:
        shared: dict[str, Any] = {"rounds": rounds, "seed": seed, "timeout": timeout, "report": _report}
        if jobs > 1:
            result = run_kills_in_parallel(what, Path(scratch), jobs=jobs, **shared)
        else:
            result = run_campaign(what, Path(scratch), named=named, seconds=seconds, **shared)
    result |= environment()
    print(
        f"{result['kills_as_documented']} of {result['kills']} random kills and {result['named_as_documented']} of {result['named']} other "
        f"faults ended as documented" + "".join(f"; {name} not tried: {why}" for name, why in result["not_tried"].items())
    )
    finish(result, out)
    if result["kills_as_documented"] < result["kills"] or result["named_as_documented"] < result["named"]:
        raise typer.Exit(1)


def _report(row: dict[str, Any]) -> None:
    ended = f"ended after {row['ended_after_s']:.1f} s" if row["ended_after_s"] is not None else "did not end"
    verdict = "as documented" if row["as_documented"] else "NOT AS DOCUMENTED: " + "; ".join(row["wrong"])
    print(f"{row['fault']:<20} {row['detail']:<60} {ended:<22} {verdict}", flush=True)


if __name__ == "__main__":
    run_command(app)
