"""Run a notebook's code cells in order and keep what they print, without Jupyter.

python -m lab.tools.notebook examples/quickstart.ipynb

Cells run in a new folder and print; what they print is stored in the notebook, so that it reads well where nobody runs it.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any


def execute(notebook: dict[str, Any]) -> list[str]:
    """What each code cell prints. Cells share their names, as in a kernel; the value of a last expression is not shown."""
    names: dict[str, Any] = {"__name__": "__main__"}
    printed = []
    for number, cell in enumerate(cell for cell in notebook["cells"] if cell["cell_type"] == "code"):
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            exec(compile(ast.parse("".join(cell["source"])), f"cell {number + 1}", "exec"), names)
        printed.append(said.getvalue())
    return printed


def with_outputs(notebook: dict[str, Any], printed: list[str]) -> dict[str, Any]:
    texts = iter(printed)
    for number, cell in enumerate(cell for cell in notebook["cells"] if cell["cell_type"] == "code"):
        text = next(texts).splitlines(keepends=True)
        cell["execution_count"] = number + 1
        cell["outputs"] = [{"name": "stdout", "output_type": "stream", "text": text}] if text else []
    return notebook


def stored_outputs(notebook: dict[str, Any]) -> list[str]:
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    return ["".join(line for output in cell["outputs"] for line in output["text"]) for cell in cells]


def main() -> None:
    path = Path(sys.argv[1]).resolve()
    notebook = json.loads(path.read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        printed = execute(notebook)
        os.chdir(path.parent)
    path.write_text(json.dumps(with_outputs(notebook, printed), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
