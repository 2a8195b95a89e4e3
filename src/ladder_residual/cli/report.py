"""``ladder report`` and the generated ``docs/reproduction.md``, as plain functions the main command line registers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(
    results: Annotated[list[Path] | None, typer.Argument(help="Result files or folders of them (JSON).")] = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="The page to write.")] = Path("report.html"),
    plots: Annotated[Path | None, typer.Option(help="Also write every chart as SVG and PNG into this folder.")] = None,
    png: Annotated[bool, typer.Option("--png/--no-png", help="PNG files need matplotlib.")] = True,
) -> None:
    """Write one self-contained HTML page: curves, timeline, tables, validation."""
    from .report import write_report

    written = write_report(results or [], out, plots, png=png)
    print(f"wrote {written[0]}" + (f" and {len(written) - 1} plots in {plots}" if plots else ""))


def reproduction(
    out: Annotated[Path, typer.Option("--out", "-o", help="The Markdown file to write.")] = Path("docs/reproduction.md"),
    check: Annotated[
        bool, typer.Option("--check", help="Write nothing; exit code 1 if the file is not what would be written.")
    ] = False,
) -> None:
    """Write docs/reproduction.md: every table of the paper, its number, ours, and the command."""
    from .points import repository_results
    from .reproduction import reproduction_markdown
    from .validate import validate

    text = reproduction_markdown(validate(*repository_results()))
    if check:
        if not out.is_file() or out.read_text() != text:
            print(f"{out} is out of date: run `ladder reproduction -o {out}`")
            raise typer.Exit(1)
        print(f"{out} is up to date")
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(text)
    print(f"wrote {out}")
