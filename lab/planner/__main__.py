"""How right the planner is.

python -m lab.planner validate      compare with the paper and with results/; exit code 1 above the bounds
python -m lab.planner constants     the fitted constants and what they were fitted on; --refit fits them again
python -m lab.planner report        the comparison as one HTML page, its charts also as files

The comparison as tables of docs/results is ``python -m lab.reports reproduction``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from ladder_residual.cli.options import Json
from ladder_residual.cli.plan import HardwareFiles
from ladder_residual.distributed.launch import run_command
from ladder_residual.plan.api import with_files

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, help="How right the planner is.")
Results = list[Path] | None


@app.command()
def validate(
    engine_results: Annotated[Results, typer.Option(help="Emulated-rank results; default: results/engine/*.json.")] = None,
    overlap_results: Annotated[
        Results, typer.Option(help="`ladder bench overlap` results; default: results/overlap/*.json.")
    ] = None,
    hardware: HardwareFiles = None,
    as_json: Json = False,
) -> None:
    """Compare the model with the paper and with measurements; exit code 1 above the bounds."""
    from lab.planner.points import repository_results
    from lab.planner.text import print_validation
    from lab.planner.validate import validate

    engine_files, overlap_files = repository_results()
    chosen = (_files(engine_results, engine_files), _files(overlap_results, overlap_files))
    result = validate(*chosen, with_files(hardware or []))
    if as_json:
        print(json.dumps(result.to_dict()))
    else:
        print_validation(result)
    if not result.passed:
        raise typer.Exit(1)


@app.command()
def constants(
    refit: Annotated[
        bool, typer.Option("--refit", help="Fit the constants again and show them beside the shipped ones.")
    ] = False,
) -> None:
    """List the fitted constants, and what was chosen by hand."""
    from lab.planner.fit import fit
    from lab.planner.text import print_constants

    print_constants({**fit("paper"), **fit("emulated")} if refit else None)


@app.command()
def report(
    out: Annotated[Path, typer.Option("--out", "-o", help="The page to write.")] = Path("planner.html"),
    plots: Annotated[Path | None, typer.Option(help="Also write every chart as SVG into this folder.")] = None,
) -> None:
    """Write the comparison as one HTML page that needs no network."""
    from lab.planner.report import write_validation_page

    written = write_validation_page(out, plots)
    print(f"wrote {out}" + (f" and {len(written) - 1} charts in {plots}" if plots else ""))


def _files(given: Results, usual: list[Path]) -> list[Path]:
    """The files given (a directory means its JSON files), or the usual ones."""
    if given is None:
        return usual
    return [file for path in given for file in (sorted(path.glob("*.json")) if path.is_dir() else [path])]


if __name__ == "__main__":
    run_command(app)
