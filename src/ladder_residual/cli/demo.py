"""``ladder demo``."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Annotated

import typer

from .options import Json


def demo(
    as_json: Json = False,
    export: Annotated[Path | None, typer.Option(help="Only write the shipped checkpoint to this directory.")] = None,
) -> None:
    """Convert, generate and measure on the tiny model the package ships; offline, under a minute."""
    from ..bench.demo import export_demo, run

    if export is not None:
        export_demo(export)
        print(f"written  {export}")
        return
    result = run((lambda line: print(line, file=sys.stderr)) if as_json else print)
    if as_json:
        print(json.dumps(result))
        return
    print(
        "\nNext: `ladder demo --export stories` writes this model, to convert and generate with; docs/quickstart.md goes on from there."
    )
    if (where := not_on_path()) is not None:
        print(f"`ladder` is {where / 'ladder'}; `source {where / 'activate'}` puts it on the PATH.")


def not_on_path() -> Path | None:
    """Where this environment's commands are, if the shell would not find them: after `make demo`."""
    folder = Path(sys.executable).parent
    found = shutil.which("ladder")
    return None if found is not None and Path(found).parent == folder else folder
