"""Starts kernels, and tells each how to wait for the one before it (``kernels_project.py`` has the numbers)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .carveout import set_carveout

EARLY = (0, 1, 2)  # what may be asked of all kernels of an engine: off; the next one may start at once; once the input is there
# Of a kernel that can read before it waits:
BEHIND = 3  # nothing that it reads is still being made when it starts
BEHIND_BUT_NEWEST = 4  # nothing but the last output that it absorbs


@dataclass
class Launcher:
    """``dependent`` says whether programmatic dependent launch may tie the next kernel to the one before it."""

    pdl: int = 1  # one of EARLY
    dependent: bool = False
    carveout: int | None = None  # GemvTiles
    next_waits: int = 0  # how the next kernel may wait if it can read before: BEHIND, BEHIND_BUT_NEWEST; 0: as ``pdl`` says
    started: dict[int, int] = field(default_factory=dict)  # compiled kernels, and how each waits
    behind: int = 0  # kernels started as BEHIND

    def __call__(
        self, kernel: Any, grid: tuple[int, ...], *args: Any, warps: int, registers: int | None = None,
        reads_before: bool = False, **constants: Any,
    ) -> None:  # fmt: skip
        options: dict[str, Any] = {"num_warps": warps}
        if registers:
            options["maxnreg"] = registers
        if self.pdl and self.dependent:
            options["launch_pdl"] = True
        waits = constants["PDL"] = self.waits(reads_before)
        compiled = kernel[grid](*args, **constants, **options)
        set_carveout(compiled, self.carveout)
        self.started[getattr(compiled, "function", 0)] = waits
        self.behind += waits == BEHIND
        self.dependent = True  # the next kernel on this stream may lean on this one, unless an event comes between

    def waits(self, reads_before: bool) -> int:
        """How the next kernel waits: as its input allows, if it can and the one before it may still be running."""
        waits, self.next_waits = self.next_waits, 0
        return waits if waits and reads_before and self.pdl and self.dependent else self.pdl
