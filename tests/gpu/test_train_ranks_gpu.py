"""Training on real ranks that share a GPU, over NCCL: the losses of TP=2, FSDP=2 and 2 x 2 against one process.

``PYTHONPATH=src:. python tests/gpu/test_train_ranks_gpu.py`` runs it from a clone without pytest; ``--out FILE`` writes what was compared.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from lab.faults.jobs import LADDER, TrainJob
from ladder_residual.common.environment import environment

SETTINGS = [("fp32", False), ("bf16", False), ("fp32", True)]
try:
    import pytest

    pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
    each_setting = pytest.mark.parametrize(("precision", "compiled"), SETTINGS)
except ImportError:  # a bare machine: main() below reads the same table

    def each_setting(function):  # type: ignore[no-redef, misc]
        return function


LAYOUTS = {"one process": (1, 1), "tp 2": (2, 1), "fsdp 2": (1, 2), "2 x 2": (2, 2)}
TOLERANCE = {"fp32": 1e-5, "bf16": 2e-3}  # relative, over 20 steps; bf16 adds in another order


def losses(folder: Path, layout: str, precision: str, compiled: bool) -> dict[int, float]:
    tp, dp = LAYOUTS[layout]
    sizes = {"tp": tp, "dp": dp, "steps": 20, "every": 50, "timeout": 120.0}
    job = TrainJob(folder / layout.replace(" ", "-"), **sizes, device="cuda", precision=precision, compiled=compiled)
    job.prepare()
    done = subprocess.run([*LADDER, *job.arguments()], capture_output=True, text=True)
    assert done.returncode == 0, f"{layout}: {done.stderr[-3000:]}"
    return job.losses()


def largest_differences(precision: str, compiled: bool) -> dict[str, float]:
    """Of a loss from that of one process, relative, by layout."""
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(len(LAYOUTS)) as pool:
        runs = {name: pool.submit(losses, Path(scratch), name, precision, compiled) for name in LAYOUTS}
        found = {name: run.result() for name, run in runs.items()}
    alone = found.pop("one process")
    assert len(alone) == 20
    assert alone[20] < alone[1]  # it learns
    return {name: max(abs(run[step] / alone[step] - 1) for step in alone) for name, run in found.items()}


@each_setting
def test_losses_equal_one_process(precision: str, compiled: bool) -> None:
    worst = largest_differences(precision, compiled)
    assert max(worst.values()) <= TOLERANCE[precision], worst


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, help="Write the differences here, a JSON result.")
    out, rows = parser.parse_args().out, []
    for precision, compiled in SETTINGS:
        row: dict[str, Any] = {"precision": precision, "compiled": compiled, "tolerance": TOLERANCE[precision]}
        try:
            row["largest_relative_difference"] = largest_differences(precision, compiled)
            row["passed"] = max(row["largest_relative_difference"].values()) <= TOLERANCE[precision]
        except AssertionError as error:
            row |= {"passed": False, "message": str(error)}
        rows.append(row)
        print(json.dumps(row), flush=True)
        if out:  # also if the rest is not reached
            result = {"benchmark": "train-losses", "steps": 20, "of": len(SETTINGS), "rows": rows, **environment()}
            out.write_text(json.dumps(result, indent=1) + "\n")
    return int(not all(row["passed"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
