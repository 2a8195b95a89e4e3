"""How far a long task is, on standard error: a bar in a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

SECONDS_BETWEEN_LINES = 10.0


@contextmanager
def progress(what: str, total: int, done: int = 0) -> Iterator[Callable[[str], None]]:
    """The function to call after each of ``total`` steps, with a note such as the speed; ``done`` were done earlier."""
    left = _time_left(total - done)
    if not sys.stderr.isatty():
        yield _lines(what, total, done, left)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[note]}"))
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(what, total=total, completed=done, note="")
        yield lambda note: bar.update(task, advance=1, note=f"{note}, {left()}" if note else left())


def _time_left(steps: int) -> Callable[[], str]:
    """After each of ``steps``, the time for the rest. Steps come in batches, so only their mean says anything; rich takes the latest."""
    start, taken = time.monotonic(), 0

    def left() -> str:
        nonlocal taken
        taken += 1
        return f"about {timedelta(seconds=round((time.monotonic() - start) / taken * (steps - taken)))} left"

    return left


def _lines(what: str, total: int, done: int, left: Callable[[], str]) -> Callable[[str], None]:
    last, at = time.monotonic(), done

    def step(note: str) -> None:
        nonlocal last, at
        at, rest, now = at + 1, left(), time.monotonic()
        if now - last >= SECONDS_BETWEEN_LINES:
            last = now
            print(", ".join(part for part in (f"{what} {at}/{total}", note, rest) if part), file=sys.stderr, flush=True)

    return step
