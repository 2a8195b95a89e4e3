"""Read broken and hostile input of every kind; anything but acceptance or one error line is a finding.

python -m lab.fuzz --inputs 10000
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lab.output import finish
from ladder_residual.distributed.launch import run_command

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def fuzz(
    inputs: Annotated[int, typer.Option(help="How many.")] = 10_000,
    seed: Annotated[int, typer.Option(help="Another seed, other inputs.")] = 0,
    first: Annotated[int, typer.Option(help="Number of the first input: one finding again is --first N --inputs 1.")] = 0,
    targets: Annotated[str, typer.Option(help="all, or names with commas: config, wiring, recipe, safetensors, ...")] = "all",
    workers: Annotated[int, typer.Option(help="Processes.")] = 2,
    out: Annotated[Path | None, typer.Option(help="Write the JSON here as well.")] = None,
) -> None:
    """Broken and hostile input of every kind, in processes with limited memory; anything but acceptance or one error line counts."""
    if inputs < 1 or workers < 1 or first < 0:
        raise ValueError(f"--inputs and --workers must be at least 1 and --first at least 0; got {inputs}, {workers}, {first}")
    from lab.fuzz.campaign import run_campaign
    from lab.fuzz.targets import TARGETS
    from ladder_residual.common.environment import environment

    chosen = list(TARGETS) if targets == "all" else [name.strip() for name in targets.split(",")]
    unknown = [name for name in chosen if name not in TARGETS]
    if unknown:
        raise ValueError(f"--targets {unknown[0]!r}: choose all, or from {', '.join(TARGETS)}")
    result = run_campaign(
        inputs, seed=seed, first=first, targets=chosen, workers=workers, say=lambda line: print(line, flush=True)
    )
    result |= environment()
    for row in result["rows"]:
        print(
            f"{row['target']:<20} accepted {row['accepted']:>6}  refused {row['refused']:>6}  unexpected {row['unexpected']:>4}"
        )
    for finding in result["findings"][:20]:
        print(f"\ninput {finding['number']} ({finding['target']}, {finding['kind']}): {finding['finding']}")
    slowest = result["slowest"]
    kinds = ", ".join(f"{kind} {count}" for kind, count in result["kinds"].items())
    print(
        f"{result['inputs']} inputs, {result['unexpected']} unexpected "
        f"({kinds}); slowest {slowest['seconds']:.2f} s of processor time "
        f"(bound {result['bound_seconds']:.0f} s); memory grew by {result['memory_grown_bytes'] >> 20} MiB at most "
        f"(bound {result['bound_memory_bytes'] >> 20} MiB)"
    )
    finish(result, out)
    if result["unexpected"]:
        raise typer.Exit(1)


if __name__ == "__main__":
    run_command(app)
