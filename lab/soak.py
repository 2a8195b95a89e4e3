"""Many short requests of mixed lengths through one loaded model, while memory, files and threads are watched.

python -m lab.soak --requests 3600 --tp 2
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from random import Random
from typing import Annotated, Any

import typer

from lab.output import finish
from ladder_residual.cli.options import Ranks
from ladder_residual.distributed.launch import on_ranks, run_command

REQUESTS = 3600  # an hour of one request per second
SAMPLES = 60
WARM_UP = 0.2  # share of the requests: allocators and caches fill up
# What memory may grow by from the end of the warm-up to the end: allocators never come to rest altogether.
GROWTH_SHARE, GROWTH_BYTES = 0.02, 16 << 20


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def soak(
    model: Annotated[str | None, typer.Option(help="Checkpoint directory; default: the tiny model the package ships.")] = None,
    requests: Annotated[int, typer.Option(help="How many.")] = REQUESTS,
    tp: Ranks = 2,
    seed: Annotated[int, typer.Option(help="Of lengths, batches and sampling.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Write the JSON here as well.")] = None,
) -> None:
    """Generate for an hour's worth of requests; nothing may grow: memory, file descriptors, threads."""
    if requests < SAMPLES:
        raise ValueError(f"--requests must be at least {SAMPLES}, one per sample, got {requests}")
    on_ranks(tp, "lab.soak")
    from ladder_residual.bench.demo import demo_directory
    from ladder_residual.common.environment import environment
    from ladder_residual.distributed.world import distributed

    with distributed("cpu") as world:
        result = run_soak(world, model or str(demo_directory()), requests, seed) | environment()
        if world.is_main:
            for row in result["rows"]:
                print(
                    f"rank {row['rank']}: memory {row['memory_bytes_warm'] / 2**20:.1f} -> {row['memory_bytes_end'] / 2**20:.1f} MiB, "
                    f"files {row['files_warm']} -> {row['files_end']}, threads {row['threads_warm']} -> {row['threads_end']}"
                )
            print(
                f"{requests} requests, {result['tokens']} tokens in {result['seconds']:.0f} s: "
                + ("nothing grew" if result["steady"] else "SOMETHING GREW")
            )
            finish(result, out)
    if not result["steady"]:
        raise typer.Exit(1)


def run_soak(world: Any, source: str, requests: int, seed: int) -> dict[str, Any]:
    """The same requests on every rank; what each of them held, at the end of the warm-up and at the end."""
    from ladder_residual.generation.completion import complete
    from ladder_residual.generation.tokenizer import load_tokenizer
    from ladder_residual.models.loading import load_model

    chance = Random(seed)
    model, tokenizer = load_model(source, world), load_tokenizer(source)
    samples: list[dict[str, int]] = []
    tokens, start = 0, time.perf_counter()
    for number in range(requests):
        prompts, sampling = _request(chance)
        tokens += sum(completion.new_tokens for completion in complete(model, tokenizer, prompts, sampling, world))
        if number * SAMPLES // requests != (number + 1) * SAMPLES // requests:
            samples.append(held())
    seconds = time.perf_counter() - start
    everyone: list[Any] = [samples]
    if world.size > 1:
        import torch.distributed as dist

        world.drain()
        everyone = [None] * world.size
        dist.all_gather_object(everyone, samples, group=world.group)
    rows = [{"rank": rank, **_summary(theirs)} for rank, theirs in enumerate(everyone)]
    return {
        "benchmark": "soak",
        "model": Path(source).name,
        "tp": world.size,
        "requests": requests,
        "tokens": tokens,
        "seconds": seconds,
        "steady": all(row["steady"] for row in rows),
        "rows": rows,
        "memory_bytes": [[sample["memory_bytes"] for sample in theirs] for theirs in everyone],
    }


def _request(chance: Random) -> tuple[list[str], Any]:
    from ladder_residual.generation.sampling import Sampling

    words = [
        "once",
        "upon",
        "a",
        "time",
        "there",
        "was",
        "little",
        "dog",
        "who",
        "liked",
        "to",
        "run",
        "and",
        "play",
        "all",
        "day",
    ]
    prompts = [" ".join(chance.choices(words, k=chance.choice([1, 4, 16, 60]))) for _ in range(chance.choice([1, 1, 2, 4]))]
    options: dict[str, Any] = {"max_new_tokens": chance.choice([1, 2, 5, 12, 30]), "seed": chance.randrange(2**31)}
    kind = chance.randrange(5)
    if kind == 0:
        options |= {"temperature": 0.0, "num_beams": 2}
    elif kind == 1:
        options |= {"temperature": 0.0, "stop": (".",)}
    elif kind == 2:
        options |= {"temperature": 0.8, "top_k": 20}
    else:
        options |= {"temperature": 0.0}
    return prompts, Sampling(**options)


def held() -> dict[str, int]:
    """What this process holds now. Linux only."""
    import gc

    gc.collect()
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    files = len(list(Path("/proc/self/fd").iterdir()))
    return {"memory_bytes": 1024 * int(fields["VmRSS"].split()[0]), "files": files, "threads": int(fields["Threads"])}


def _summary(samples: list[dict[str, int]]) -> dict[str, Any]:
    """Medians of the samples after the warm-up against those at the end."""
    warm = samples[int(WARM_UP * len(samples)) :]
    part = max(1, len(warm) // 4)
    row: dict[str, Any] = {}
    for name in ("memory_bytes", "files", "threads"):
        row[f"{name}_warm"] = int(statistics.median(sample[name] for sample in warm[:part]))
        row[f"{name}_end"] = int(statistics.median(sample[name] for sample in warm[-part:]))
    room = GROWTH_SHARE * row["memory_bytes_warm"] + GROWTH_BYTES
    row["steady"] = bool(
        row["memory_bytes_end"] <= row["memory_bytes_warm"] + room
        and row["files_end"] <= row["files_warm"]
        and row["threads_end"] <= row["threads_warm"]
    )
    return row


if __name__ == "__main__":
    run_command(app)
