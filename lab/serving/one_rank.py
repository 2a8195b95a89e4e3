"""What a wiring costs in vLLM on one rank, where there is nothing to hide: it should cost nothing.

    python -m lab.serving.one_rank

vLLM's own model and rewired ones, same weights, decode the same prompts in turn. Two engines of the very same model may differ by 10 %
for as long as they live (where their memory lies, which was built first), which is more than what is looked for. So vLLM's own model
takes part twice, all engines share one process, and there are as many processes as engines, each with another one first: what comes
from the place in line cancels out, and the distance between vLLM and itself says how far to trust the rest. The number of ops needs
no such care.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from lab.output import finish
from lab.serving.one_rank_worker import AGAIN, OWN
from lab.serving.servers import environment_with_vllm, random_checkpoint
from ladder_residual.cli.options import split_wirings
from ladder_residual.common.markdown import table
from ladder_residual.distributed.launch import run_command

PROCESS_SECONDS = 1800
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def one_rank(
    model: Annotated[str | None, typer.Option(help="Plain checkpoint directory; default: a Llama with random weights.")] = None,
    wirings: Annotated[str, typer.Option(help="Compared with vLLM's own model, which is measured twice.")] = "standard,ladder",
    modes: Annotated[str, typer.Option(help="eager, compiled or both with a comma.")] = "eager,compiled",
    batch: Annotated[int, typer.Option(help="Sequences decoded together.")] = 1,
    new_tokens: Annotated[int, typer.Option(help="Tokens of one measurement.")] = 64,
    rounds: Annotated[int, typer.Option(help="Measurements of each engine in each process.")] = 10,
    processes: Annotated[int | None, typer.Option(help="Default: one per engine, so that each is first once.")] = None,
    layers: Annotated[int, typer.Option(help="Layers of the random model.")] = 12,
    hidden: Annotated[
        int, typer.Option(help="Hidden size of the random model; small, so that what is not arithmetic shows.")
    ] = 256,
    out: Annotated[Path | None, typer.Option(help="Write the JSON result here too.")] = None,
) -> None:
    """What a wiring costs in vLLM on one rank: CPU time per step against vLLM's own model."""
    names = [OWN, *split_wirings(wirings), AGAIN]
    chosen = [mode.strip() for mode in modes.split(",")]
    for mode in chosen:
        if mode not in ("eager", "compiled"):
            raise ValueError(f"unknown mode {mode!r}; choose eager, compiled or both with a comma")
    numbers = {"batch": batch, "new_tokens": new_tokens, "rounds": rounds, "processes": processes or len(names)}
    for name, value in numbers.items():
        if not 1 <= value <= 128:
            raise ValueError(f"--{name.replace('_', '-')} must be from 1 to 128, got {value}")
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="ladder-tp1-") as scratch:
        folder = Path(scratch)
        checkpoint = model or str(random_checkpoint(folder / "plain", layers, hidden))
        for mode in chosen:
            samples = []
            for number in range(numbers["processes"]):
                order = names[number % len(names) :] + names[: number % len(names)]
                print(f"{mode}, process {number + 1}/{numbers['processes']}: {', '.join(order)}", file=sys.stderr, flush=True)
                job = {"model": checkpoint, "order": order, "eager": mode == "eager", **numbers}
                samples.append(_run_process(folder, job))
            rows += [{"mode": mode} | row for row in summarise(names, samples)]
    result = {"benchmark": "vllm-tp1", "model": model or f"random Llama, {layers} layers of {hidden}", **numbers, "rows": rows}
    result |= environment_with_vllm()
    _print(result)
    finish(result, out)


def summarise(names: list[str], samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row per engine. ``samples``: per process and engine the (CPU, wall) milliseconds of a step, and its number of ops.

    Ratios are formed within a round, whose engines saw the same machine; a process gives their median, the row the geometric mean
    over processes and the least and greatest of them.
    """
    rows = []
    for name in names:
        row: dict[str, Any] = {"engine": name, "ops": samples[0][name]["ops"]}
        for index, clock in enumerate(("cpu", "wall")):
            ratios = [
                statistics.median(own[index] / base[index] for own, base in zip(run[name]["ms"], run[OWN]["ms"], strict=True))
                for run in samples
            ]
            row[f"{clock}_ms"] = statistics.median(pair[index] for run in samples for pair in run[name]["ms"])
            row |= {f"{clock}_ratio": statistics.geometric_mean(ratios)}
            row |= {f"{clock}_ratio_min": min(ratios), f"{clock}_ratio_max": max(ratios)}
        rows.append(row)
    return rows


def _run_process(folder: Path, job: dict[str, Any]) -> dict[str, Any]:
    given, found, log = folder / "job.json", folder / "found.json", folder / "log"
    found.unlink(missing_ok=True)
    given.write_text(json.dumps(job), encoding="utf-8")
    core = max(os.sched_getaffinity(0))
    environment = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # all engines in this one process, so that its CPU time is theirs
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": str(core),
        "OMP_NUM_THREADS": "1",
        "VLLM_CACHE_ROOT": str(folder / "cache"),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
    }
    command = [sys.executable, "-m", "lab.serving.one_rank_worker", str(given), str(found)]
    with log.open("wb") as sink:
        process = subprocess.Popen(
            command,
            env=environment,
            stdout=sink,
            stderr=subprocess.STDOUT,
        )
        try:
            process.wait(PROCESS_SECONDS)
        finally:
            process.kill()
            process.wait()
    if not found.exists():
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-30:])
        raise ValueError(f"vLLM gave no result (is it installed in this environment?). The end of its log:\n{tail}")
    return json.loads(found.read_text(encoding="utf-8"))


def _print(result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    drawn = Table("", "model", "CPU ms/step", "of vLLM's", "min-max", "wall ms/step", "of vLLM's", "ops/step")
    for row in result["rows"]:
        cpu = (f"{row['cpu_ms']:.2f}", f"{row['cpu_ratio']:.3f}", f"{row['cpu_ratio_min']:.3f}-{row['cpu_ratio_max']:.3f}")
        drawn.add_row(
            row["mode"], row["engine"], *cpu, f"{row['wall_ms']:.2f}", f"{row['wall_ratio']:.3f}", f"{row['ops']:.0f}"
        )
    Console(width=110).print(drawn)


def markdown_table(result: dict[str, Any]) -> str:
    """The result as a table."""
    rows = []
    for row in result["rows"]:
        spread = f"{row['cpu_ratio_min']:.3f} to {row['cpu_ratio_max']:.3f}"
        rows.append(
            (row["mode"], row["engine"], f"{row['cpu_ms']:.2f}", f"{row['cpu_ratio']:.3f}", spread, f"{row['ops']:.0f}")
        )
    return table(("", "model", "CPU ms per step", "against vLLM's", "least to greatest", "ops per step"), rows)


if __name__ == "__main__":
    run_command(app)
