"""Training on real ranks that share a GPU, over NCCL: the losses of TP=2, FSDP=2 and 2 x 2 against one process.

``PYTHONPATH=src:. python tests/gpu/test_train_ranks_gpu.py`` runs it from a clone without pytest.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from lab.faults.jobs import LADDER, TrainJob

try:
    import pytest

    pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
    each_setting = pytest.mark.parametrize(("precision", "compiled"), [("fp32", False), ("fp32", True), ("bf16", False)])
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


@each_setting
def test_losses_equal_one_process(precision: str, compiled: bool) -> None:
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(len(LAYOUTS)) as pool:
        runs = {name: pool.submit(losses, Path(scratch), name, precision, compiled) for name in LAYOUTS}
        found = {name: run.result() for name, run in runs.items()}
    alone = found.pop("one process")
    assert len(alone) == 20
    assert alone[20] < alone[1]  # it learns
    worst = {name: max(abs(run[step] / alone[step] - 1) for step in alone) for name, run in found.items()}
    print(f"{precision}{', compiled' if compiled else ''}: largest relative difference of a loss {worst}", flush=True)
    assert max(worst.values()) <= TOLERANCE[precision], worst


def main() -> int:
    failures = 0
    for precision, compiled in (("fp32", False), ("fp32", True), ("bf16", False)):
        try:
            test_losses_equal_one_process(precision, compiled)
        except AssertionError as error:
            failures += 1
            print(f"FAILED {precision} compiled={compiled}: {error}", flush=True)
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
