"""``ladder report``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(
    results: Annotated[list[Path] | None, typer.Argument(help="Result files or folders of them (JSON).")] = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="The page to write.")] = Path("report.html"),
    validation: Annotated[
        bool, typer.Option("--validation", help="Also show how well the planner predicts each emulated step.")
    ] = False,
    plots: Annotated[Path | None, typer.Option(help="Also write every chart as SVG into this folder.")] = None,
) -> None:
    """Write your results as one HTML page: comparison, quality, curves and timelines."""
    from ..report.page import write_report

    written = write_report(results or [], out, plots, validation=validation)
    print(f"wrote {written[0]}" + (f" and {len(written) - 1} charts in {plots}" if plots else ""))
