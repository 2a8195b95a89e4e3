"""What a published figure carries with it: commit, date, hardware and versions, on CPU and GPU machines alike."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from pathlib import Path
from typing import Any


def environment() -> dict[str, Any]:
    import torch
    import transformers

    from .version import __version__

    found: dict[str, Any] = {
        "commit": _commit(),
        "date": datetime.date.today().isoformat(),
        "machine": f"{_processor()}, {os.cpu_count()} cores, {torch.get_num_threads()} thread(s) per rank",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "ladder_residual": __version__,
    }
    if torch.cuda.is_available():
        import triton

        found |= {"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda, "triton": triton.__version__}
    return found


def _processor() -> str:
    try:
        names = [
            line.split(":", 1)[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
        ]
    except OSError:
        names = []
    return names[0] if names else platform.machine()


def _commit() -> str | None:
    """The commit of the source tree this package runs from; ``LADDER_COMMIT`` names it where the files came without their history."""
    if given := os.environ.get("LADDER_COMMIT"):
        return given
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
