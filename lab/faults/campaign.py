"""Random kills, then every other fault once."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .outcome import Outcome

Say = Callable[[dict[str, Any]], None]


def run_campaign(
    what: str, directory: Path, *, rounds: int, named: str, seed: int, timeout: float, say: Say = lambda row: None
) -> dict[str, Any]:
    chance = random.Random(seed)
    if what == "generate":
        from ...demo import demo_directory
        from . import generating
        from .jobs import GenerateJob

        job = GenerateJob(directory, str(demo_directory()), timeout=timeout)
        duration = generating.undisturbed(job)
        faults = generating.named_faults(job)

        def kill() -> Outcome | None:
            return generating.random_kill(job, duration, chance)
    else:
        from . import training
        from .jobs import TrainJob

        run = TrainJob(directory, timeout=timeout)
        duration = training.undisturbed(run)
        layouts, durations = [run, training.copies(run)], {0: duration}
        faults = training.named_faults(*layouts)
        turns = itertools.count()

        def kill() -> Outcome | None:
            """By turns: restarted by torchrun and by hand, twice with the model cut over the ranks, twice with a copy on each."""
            turn = next(turns)
            layout = turn // 2 % 2
            if layout not in durations:
                durations[layout] = training.undisturbed(layouts[layout])
            return training.random_kill(layouts[layout], durations[layout], chance, elastic=turn % 2 == 0)

    chosen = _chosen(named, [name for name, _, _ in faults])
    attempts = (kill() for _ in range(3 * rounds))  # one that comes too late, when the run has ended, does not count
    kills = [_told(outcome, say) for outcome in itertools.islice(filter(None, attempts), rounds)]
    not_tried = {name: why for name, why, _ in faults if name in chosen and why}
    others = [_told(how(), say) for name, why, how in faults if name in chosen and not why]
    return {
        "benchmark": "faults",
        "what": what,
        "undisturbed_s": duration,
        "timeout_s": timeout,
        "seed": seed,
        "kills": len(kills),
        "kills_as_said": sum(row["as_said"] for row in kills),
        "named": len(others),
        "named_as_said": sum(row["as_said"] for row in others),
        "unfinished_saves": sum(row["unfinished_saves"] for row in kills + others),
        "slowest_end_s": max((row["ended_after_s"] or 0.0 for row in kills + others), default=0.0),
        "not_tried": not_tried,
        "rows": kills + others,
    }


def _chosen(named: str, known: list[str]) -> list[str]:
    if named in ("all", "none"):
        return known if named == "all" else []
    chosen = [part.strip() for part in named.split(",")]
    unknown = [name for name in chosen if name not in known]
    if unknown:
        raise ValueError(f"--named {unknown[0]!r}: choose all, none, or from {', '.join(known)}")
    return chosen


def _told(outcome: Outcome, say: Say) -> dict[str, Any]:
    row = outcome.to_dict()
    say(row)
    return row
