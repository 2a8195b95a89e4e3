"""Call a function on several ranks of this host, from a script or notebook that is none of them.

The launcher runs in a process of its own, because it sets environment variables and signal handlers that a notebook must not lose.
Arguments and the result travel as JSON files.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any

from .launch import USER_ERROR, launch, launched, run_command

_REQUEST, _RESULT = "request.json", "result.json"


def call_on_ranks(function: Callable[..., Any], ranks: int, arguments: Mapping[str, Any], timeout: float | None = None) -> Any:
    """``function(**arguments)`` on ``ranks`` new processes that met on the device ``arguments["device"]``: rank 0's result, as JSON
    gives it back. ``timeout``: seconds a rank waits for the others."""
    request = {
        "module": function.__module__,
        "function": function.__name__,
        "arguments": {name: str(value) if isinstance(value, Path) else value for name, value in arguments.items()},
        "ranks": ranks,
        "options": {"device": arguments["device"]} | ({"timeout": timeout} if timeout else {}),
    }
    with tempfile.TemporaryDirectory(prefix="ladder-call-") as folder:
        Path(folder, _REQUEST).write_text(json.dumps(request), encoding="utf-8")
        command = [sys.executable, "-m", __name__, folder]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, encoding="utf-8", errors="replace")
        if done.returncode == 0:
            print(done.stdout, end="", file=sys.stderr)
            return json.loads(Path(folder, _RESULT).read_text(encoding="utf-8"))
    errors = [line.removeprefix("error: ") for line in done.stdout.splitlines() if line.startswith("error: ")]
    if errors and done.returncode == USER_ERROR:
        raise ValueError("; ".join(errors))
    raise RuntimeError("; ".join(errors) or f"the {ranks} ranks failed:\n{done.stdout[-4000:]}")


def main(folder: Path) -> None:
    """The launcher's process first, then each rank."""
    request = json.loads((folder / _REQUEST).read_text(encoding="utf-8"))
    if launched() == 1:
        command = "ladder_residual.distributed.call"
        raise SystemExit(launch([str(folder)], request["ranks"], command, preload=request["module"]))
    from .world import distributed  # not at the top: the launcher sets the number of threads before it imports torch

    function = getattr(import_module(request["module"]), request["function"])
    with distributed(**request["options"]) as world:
        result = function(**request["arguments"])
        if world.is_main:
            (folder / _RESULT).write_text(json.dumps(result, default=asdict), encoding="utf-8")


if __name__ == "__main__":
    run_command(lambda: main(Path(sys.argv[1])))
