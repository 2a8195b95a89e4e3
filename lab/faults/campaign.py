"""Random kills, then every other fault once."""

from __future__ import annotations

import itertools
import multiprocessing
import random
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lab.faults.outcome import Outcome

if TYPE_CHECKING:
    from lab.faults.jobs import TrainJob

Report = Callable[[dict[str, Any]], None]


Fault = tuple[str, str | None, Callable[[], Outcome]]  # its name, why it cannot be tried here, how
Attempts = Iterable[Outcome | None]  # None: the kill came too late, when the run had ended; it does not count


def run_campaign(
    what: str, directory: Path, *, rounds: int, named: str, seed: int, timeout: float, report: Report = lambda row: None,
    seconds: float | None = None,
) -> dict[str, Any]:  # fmt: skip
    """``seconds``: after which no other kill begins."""
    ends = None if seconds is None else time.monotonic() + seconds
    duration, attempts, faults = CAMPAIGNS[what](directory, random.Random(seed), rounds, timeout)
    chosen = _chosen(named, [name for name, _, _ in faults])
    kills = [_reported(outcome, report) for outcome in _first(rounds, before(ends, attempts), what)]
    not_tried = {name: why for name, why, _ in faults if name in chosen and why}
    others = [_reported(how(), report) for name, why, how in faults if name in chosen and not why]
    about = {"what": what, "undisturbed_s": duration, "timeout_s": timeout, "seed": seed}
    return _result(about, kills, others, not_tried)


def run_kills_in_parallel(
    what: str, directory: Path, *, rounds: int, jobs: int, seed: int, timeout: float, report: Report = lambda row: None
) -> dict[str, Any]:
    """``jobs`` campaigns at a time share out the kills, each in a process and a directory of its own, with seeds that follow ``seed``."""
    shares = [rounds // jobs + (number < rounds % jobs) for number in range(jobs)]
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        started = [
            pool.submit(run_campaign, what, directory / str(job), rounds=share, named="none", seed=seed + job, timeout=timeout)
            for job, share in enumerate(shares)
        ]
        found = []
        for each in as_completed(started):
            found.append(each.result())
            for row in found[-1]["rows"]:
                report(row)
    found.sort(key=lambda result: result["seed"])
    about = {name: found[0][name] for name in ("what", "undisturbed_s", "timeout_s", "seed")}
    return _result(about | {"jobs": jobs}, [row for result in found for row in result["rows"]], [], {})


def _result(
    about: dict[str, Any], kills: list[dict[str, Any]], others: list[dict[str, Any]], not_tried: dict[str, str]
) -> dict[str, Any]:
    return {
        "benchmark": "faults",
        **about,
        "kills": len(kills),
        "kills_as_documented": sum(row["as_documented"] for row in kills),
        "named": len(others),
        "named_as_documented": sum(row["as_documented"] for row in others),
        "unfinished_saves": sum(row["unfinished_saves"] for row in kills + others),
        "slowest_end_s": max((row["ended_after_s"] or 0.0 for row in kills + others), default=0.0),
        "not_tried": not_tried,
        "rows": kills + others,
    }


def before(ends: float | None, attempts: Attempts) -> Attempts:
    """Those that begin in time."""
    remaining = iter(attempts)
    while ends is None or time.monotonic() < ends:
        try:
            yield next(remaining)
        except StopIteration:
            return


def _first(rounds: int, attempts: Attempts, what: str) -> Iterable[Outcome]:
    done = (outcome for outcome in attempts if outcome is not None)
    return done if what in WRITERS and rounds else itertools.islice(done, rounds)


def _generate(directory: Path, chance: random.Random, rounds: int, timeout: float) -> tuple[float, Attempts, list[Fault]]:
    from lab.faults import generate_faults
    from lab.faults.jobs import GenerateJob
    from ladder_residual.bench.demo import demo_directory

    job = GenerateJob(directory, str(demo_directory()), timeout=timeout)
    duration = generate_faults.undisturbed(job)
    attempts = (generate_faults.random_kill(job, duration, chance) for _ in range(3 * rounds))
    return duration, attempts, generate_faults.named_faults(job)


def _train(directory: Path, chance: random.Random, rounds: int, timeout: float) -> tuple[float, Attempts, list[Fault]]:
    """By turns: restarted by torchrun and by hand, twice with the model sharded over the ranks, twice with a copy on each."""
    from lab.faults import train_faults
    from lab.faults.jobs import TrainJob

    run = TrainJob(directory, timeout=timeout)
    layouts = [run, train_faults.copies(run)]
    duration, attempts = _train_kills(layouts, chance, rounds)
    return duration, attempts, train_faults.named_faults(*layouts)


def _train_2x2(directory: Path, chance: random.Random, rounds: int, timeout: float) -> tuple[float, Attempts, list[Fault]]:
    """Two copies of the model, each sharded over two ranks; started again by hand."""
    from lab.faults.jobs import TrainJob

    job = TrainJob(directory, steps=20, tp=2, dp=2, timeout=timeout)
    return *_train_kills([job], chance, rounds, elastic=False), []


def _train_kills(layouts: list[TrainJob], chance: random.Random, rounds: int, elastic: bool = True) -> tuple[float, Attempts]:
    """``elastic``: every other time torchrun starts the ranks again."""
    from lab.faults import train_faults

    durations = {0: train_faults.undisturbed(layouts[0])}

    def kill(turn: int) -> Outcome | None:
        layout = turn // 2 % len(layouts)
        if layout not in durations:
            durations[layout] = train_faults.undisturbed(layouts[layout])
        return train_faults.random_kill(layouts[layout], durations[layout], chance, elastic=elastic and turn % 2 == 0)

    return durations[0], map(kill, range(3 * rounds))


def _generate_gpu(directory: Path, chance: random.Random, rounds: int, timeout: float) -> tuple[float, Attempts, list[Fault]]:
    """Ranks that share a GPU, in the CUDA engine's graphs over symmetric memory; a rank that is left would spin there for ever."""
    from lab.faults import generate_faults
    from lab.faults.gpu import engine_checkpoint, own_mps, used_mib, with_free_gpu
    from lab.faults.jobs import GenerateJob

    own_mps(directory)
    share = ("--share-gpu", "--device", "cuda", "--engine", "cuda", "--schedule", "serial", "--reducer", "symm")
    checkpoint = engine_checkpoint(directory / "checkpoint")
    job = GenerateJob(directory, str(checkpoint), prompts=30, new_tokens=200, timeout=timeout, more=share)
    duration, idle = generate_faults.undisturbed(job), used_mib()
    job.reference = []  # random weights: which of two near ties is chosen may depend on the tiles timed at start-up
    attempts = (generate_faults.random_kill(job, duration, chance) for _ in range(3 * rounds))
    return duration, (with_free_gpu(outcome, idle) for outcome in attempts), []


RESUMED = 5  # one in so many killed runs on a GPU is started again: that a run resumes does not depend on the GPU


def _train_gpu(directory: Path, chance: random.Random, rounds: int, timeout: float) -> tuple[float, Attempts, list[Fault]]:
    """Ranks that share a GPU, tensor-parallel over NCCL."""
    from lab.faults import train_faults
    from lab.faults.gpu import own_mps, used_mib, with_free_gpu
    from lab.faults.jobs import TrainJob

    own_mps(directory)
    job = TrainJob(directory, steps=60, timeout=timeout, device="cuda")
    duration, idle = train_faults.undisturbed(job), used_mib()
    attempts = (
        train_faults.random_kill(job, duration, chance, elastic=False, again=turn % RESUMED == 0) for turn in range(3 * rounds)
    )
    return duration, (with_free_gpu(outcome, idle) for outcome in attempts), []


def _adapt(directory: Path, chance: random.Random, rounds: int, timeout: float) -> tuple[float, Attempts, list[Fault]]:
    """By turns with DDP and with FSDP."""
    from lab.faults import adapt_faults

    jobs = [adapt_faults.AdaptJob(directory, parallel) for parallel in ("ddp", "fsdp")]
    durations = [adapt_faults.undisturbed(job) for job in jobs]
    attempts = (adapt_faults.random_kill(jobs[turn % 2], durations[turn % 2], chance) for turn in range(3 * rounds))
    return durations[0], attempts, []


def _writer(
    what: str, directory: Path, chance: random.Random, rounds: int, timeout: float
) -> tuple[float, Attempts, list[Fault]]:
    from lab.faults import writer_faults

    job = writer_faults.WriterJob(directory, what)
    duration = writer_faults.undisturbed(job)
    return duration, (writer_faults.killed_at(job, number) for number in writer_faults.moments(job, rounds)), []


WRITERS = ("convert", "prepare")
CAMPAIGNS: dict[str, Callable[[Path, random.Random, int, float], tuple[float, Attempts, list[Fault]]]] = {
    "generate": _generate,
    "generate-gpu": _generate_gpu,
    "train-gpu": _train_gpu,
    "train": _train,
    "train-2x2": _train_2x2,
    "adapt": _adapt,
    "convert": partial(_writer, "convert"),
    "prepare": partial(_writer, "prepare"),
}


def _chosen(named: str, known: list[str]) -> list[str]:
    if named in ("all", "none"):
        return known if named == "all" else []
    chosen = [part.strip() for part in named.split(",")]
    unknown = [name for name in chosen if name not in known]
    if unknown:
        raise ValueError(f"--named {unknown[0]!r}: choose all, none, or from {', '.join(known)}")
    return chosen


def _reported(outcome: Outcome, report: Report) -> dict[str, Any]:
    row = outcome.to_dict()
    report(row)
    return row
