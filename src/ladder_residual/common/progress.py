"""How far a long task is, on standard error: a bar in a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

SECONDS_BETWEEN_LINES = 10.0


@contextmanager
def progress(what: str, total: int, done: int = 0) -> Iterator[Callable[[str], None]]:
    """The function to call after each of ``total`` steps, with a note such as the speed; ``done`` were done earlier."""
    if not sys.stderr.isatty():
        yield _lines(what, total, done)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[note]}"), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(what, total=total, completed=done, note="")
        yield lambda note: bar.update(task, advance=1, note=note)


def _lines(what: str, total: int, done: int) -> Callable[[str], None]:
    start = last = time.monotonic()
    steps = 0

    def step(note: str) -> None:
        nonlocal last, steps
        steps += 1
        now = time.monotonic()
        if now - last >= SECONDS_BETWEEN_LINES:
            last = now
            left = (now - start) / steps * (total - done - steps)
            note = f", {note}" if note else ""
            print(f"{what} {done + steps}/{total}{note}, about {left:.0f} s left", file=sys.stderr, flush=True)

    return step
