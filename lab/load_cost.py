"""What the check of every weight costs: the same checkpoint with and without it, by turns, in processor time on one thread.

python -m lab.load_cost --rounds 9

A load maps the file and reads nothing, so the check is what reads it first: beside a load alone its whole cost shows. Users wait for
the first token of a command, which needs all weights.
"""

from __future__ import annotations

import gc
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from lab.output import finish
from ladder_residual.distributed.launch import run_command

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def load_cost(
    model: Annotated[str, typer.Option(help="Published shape; its weights are random.")] = "smollm2-135m",
    rounds: Annotated[int, typer.Option(help="Of each kind, after one that is not counted.")] = 9,
    out: Annotated[Path | None, typer.Option(help="Write the JSON here as well.")] = None,
) -> None:
    """Processor time of a load, and of a command up to its first token, with and without the check for NaN and infinities."""
    if rounds < 1:
        raise ValueError(f"--rounds must be at least 1, got {rounds}")
    from ladder_residual.common.environment import environment

    rows = [row for dtype in ("float32", "bfloat16") for row in measure(model, dtype, rounds)]
    for row in rows:
        print(
            f"{row['what']:<28} {row['dtype']:<9} {row['bytes'] / 2**20:4.0f} MiB: {1e3 * row['unchecked_s']:6.0f} -> "
            f"{1e3 * row['checked_s']:6.0f} ms ({row['cost_percent']:+.1f} %)"
        )
    finish({"benchmark": "load cost", "model": model, "rounds": rounds, "rows": rows} | environment(), out)


def measure(model: str, dtype: str, rounds: int) -> list[dict[str, Any]]:
    import torch

    from ladder_residual.bench.demo import demo_directory
    from ladder_residual.distributed.world import World
    from ladder_residual.models.loading import DTYPES
    from ladder_residual.models.presets import ModelShape
    from ladder_residual.models.random_weights import random_model

    torch.set_num_threads(1)  # others of a pool wait by spinning, which would count
    with tempfile.TemporaryDirectory(prefix="ladder-load-") as scratch:
        random_model(ModelShape.from_name(model), World(), DTYPES[dtype]).save_pretrained(scratch)
        for path in demo_directory().glob("tokenizer*"):
            shutil.copy(path, scratch)
        size = sum(path.stat().st_size for path in Path(scratch).glob("*.safetensors"))
        ways: dict[str, Callable[[str, bool], float]] = {
            "load_model": load,
            "load_model and a forward": load_and_forward,
            "ladder generate -n 1": first_token,
        }
        return [{"what": what, "dtype": dtype, "bytes": size, **compared(how, scratch, rounds)} for what, how in ways.items()]


def compared(how: Callable[[str, bool], float], source: str, rounds: int) -> dict[str, float]:
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for turn in range(rounds + 1):
        for checked in (True, False) if turn % 2 else (False, True):
            took = how(source, checked)
            if turn:
                seconds[checked].append(took)
    checked_s, unchecked_s = statistics.median(seconds[True]), statistics.median(seconds[False])
    return {"checked_s": checked_s, "unchecked_s": unchecked_s, "cost_percent": 100 * (checked_s / unchecked_s - 1)}


def load(source: str, checked: bool, forward: bool = False) -> float:
    import torch

    from ladder_residual.models.loading import load_model

    gc.collect()
    start = time.process_time()
    model = load_model(source, allow_nonfinite=not checked)
    if forward:
        with torch.no_grad():
            model(torch.ones(1, 8, dtype=torch.int64))
    return time.process_time() - start


def load_and_forward(source: str, checked: bool) -> float:
    return load(source, checked, forward=True)


def first_token(source: str, checked: bool) -> float:
    words = [sys.executable, "-m", "ladder_residual", "generate", source, "--prompt", "Once upon a time", "-n", "1"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        [*words, *([] if checked else ["--allow-nonfinite"])],
        check=True,
        capture_output=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


if __name__ == "__main__":
    run_command(app)
