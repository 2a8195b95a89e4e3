"""One run at a time in a run's directory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from ..common.locks import Lock
from ..distributed.world import World


@contextmanager
def run_lock(directory: Path, world: World) -> Iterator[None]:
    """Make ``directory`` and hold its lock on rank 0, for all ranks; where another run holds it, every rank raises ValueError."""
    with ExitStack() as held:
        refusal = None
        if world.is_main:
            try:
                directory.mkdir(parents=True, exist_ok=True)
                held.enter_context(Lock(directory))
            except (OSError, ValueError) as error:
                refusal = str(error)
        refusal = world.broadcast(refusal)
        if refusal is not None:
            raise ValueError(refusal)
        yield
