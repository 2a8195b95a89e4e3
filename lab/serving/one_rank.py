"""What a wiring costs in vLLM on one rank, where there is nothing to hide: it should cost nothing.

    ladder bench vllm-tp1

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
import time
from pathlib import Path
from typing import Annotated, Any

import typer

OWN, AGAIN = "vllm", "vllm again"
PROCESS_SECONDS = 1800


def vllm_tp1(
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
    from .commands import split_wirings
    from .vllm_servers import environment_with_vllm, random_checkpoint

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
    text = json.dumps(result)
    if out is not None:
        out.write_text(text + "\n", encoding="utf-8")
    print(text)


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
    with log.open("wb") as sink:
        process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(given), str(found)], env=environment, stdout=sink, stderr=subprocess.STDOUT
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


def _measure_engines(job: dict[str, Any]) -> dict[str, Any]:
    import torch

    from vllm import LLM, SamplingParams

    from ..checkpoint import read_json
    from ..families import family_of
    from ..hf_config import class_name

    architecture = class_name(family_of(read_json(Path(job["model"]) / "config.json")).model_type, "ForCausalLM")
    engines = {}
    for name in job["order"]:
        overrides = {} if name in (OWN, AGAIN) else {"architectures": [architecture], "wiring": name}
        engines[name] = LLM(
            job["model"],
            hf_overrides=overrides,
            enforce_eager=job["eager"],
            dtype="float32",
            skip_tokenizer_init=True,
            max_model_len=job["new_tokens"] + 32,
            block_size=128,
            max_num_seqs=job["batch"],
            num_gpu_blocks_override=8 + 2 * job["batch"],  # of 128 tokens; by default each engine would take a gigabyte
        )
    prompts: list[Any] = [{"prompt_token_ids": [number + 3] * 16} for number in range(job["batch"])]
    sampling = SamplingParams(temperature=0, max_tokens=job["new_tokens"], ignore_eos=True, detokenize=False)

    def decode(name: str) -> None:
        engines[name].generate(prompts, sampling, use_tqdm=False)

    found: dict[str, Any] = {name: {"ms": []} for name in engines}
    for name in engines:
        decode(name)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            decode(name)
        found[name]["ops"] = sum(event.count for event in profiler.key_averages()) / job["new_tokens"]
    for number in range(job["rounds"]):
        for name in list(engines)[:: 1 if number % 2 else -1]:
            cpu, wall = time.process_time(), time.perf_counter()
            decode(name)
            spent = (time.process_time() - cpu, time.perf_counter() - wall)
            found[name]["ms"].append([1e3 * seconds / job["new_tokens"] for seconds in spent])
    return found


def _print(result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("", "model", "CPU ms/step", "of vLLM's", "min-max", "wall ms/step", "of vLLM's", "ops/step")
    for row in result["rows"]:
        cpu = (f"{row['cpu_ms']:.2f}", f"{row['cpu_ratio']:.3f}", f"{row['cpu_ratio_min']:.3f}-{row['cpu_ratio_max']:.3f}")
        table.add_row(
            row["mode"], row["engine"], *cpu, f"{row['wall_ms']:.2f}", f"{row['wall_ratio']:.3f}", f"{row['ops']:.0f}"
        )
    Console(width=110).print(table)


def markdown_table(result: dict[str, Any]) -> str:
    """The result as the table of docs/serving.md."""
    lines = ["| | model | CPU ms per step | against vLLM's | least to greatest | ops per step |", "|---|---|---|---|---|---|"]
    for row in result["rows"]:
        spread = f"{row['cpu_ratio_min']:.3f} to {row['cpu_ratio_max']:.3f}"
        cells = (row["mode"], row["engine"], f"{row['cpu_ms']:.2f}", f"{row['cpu_ratio']:.3f}", spread, f"{row['ops']:.0f}")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(_measure_engines(json.loads(Path(sys.argv[1]).read_text()))))
