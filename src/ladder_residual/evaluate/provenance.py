"""What a published figure carries with it, on CPU and GPU machines, with or without the repository at hand."""

from __future__ import annotations

import os
from typing import Any


def provenance() -> dict[str, Any]:
    """Date, commit, versions and hardware of this run."""
    from ..bench.gpu_report import environment as gpu_environment
    from ..bench.overlap import environment

    found = environment()
    found["commit"] = found["commit"] or os.environ.get(
        "LADDER_COMMIT"
    )  # for machines that get the files without the repository
    return found | {key: value for key, value in gpu_environment().items() if key in ("gpu", "cuda")}
