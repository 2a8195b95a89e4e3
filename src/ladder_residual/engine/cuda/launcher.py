"""Launches kernels and tells each when to wait for the previous one (``pdl.py``)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .pdl import PdlMode
from .smem_carveout import set_carveout


@dataclass
class Launcher:
    """One per CUDA stream of a chain."""

    pdl: PdlMode = PdlMode.TRIGGER_THEN_WAIT  # of kernels that wait before they read
    dependent: bool = False  # whether the next kernel may start before the previous one ends
    smem_carveout: int | None = None  # per cent, of every kernel (``smem_carveout.py``)
    next_pdl: PdlMode | None = None  # of the next kernel, if that can read before it waits
    launched: dict[int, PdlMode] = field(default_factory=dict)  # compiled functions and their modes
    late_waits: int = 0  # launches in WAIT_AFTER_COMPUTE

    def __call__(
        self, kernel: Any, grid: tuple[int, ...], *args: Any, num_warps: int, max_registers: int | None = None,
        can_read_before_wait: bool = False, **constants: Any,
    ) -> None:  # fmt: skip
        options: dict[str, Any] = {"num_warps": num_warps}
        if max_registers:
            options["maxnreg"] = max_registers
        if self.pdl and self.dependent:
            options["launch_pdl"] = True
        mode = self.take_mode(can_read_before_wait)
        compiled = kernel[grid](*args, **constants, PDL=int(mode), **options)
        set_carveout(compiled, self.smem_carveout)
        self.launched[getattr(compiled, "function", 0)] = mode
        self.late_waits += mode == PdlMode.WAIT_AFTER_COMPUTE
        self.dependent = True  # on this stream, until an event comes between

    def take_mode(self, can_read_before_wait: bool) -> PdlMode:
        """The mode of the kernel launched now; ``next_pdl`` holds for one kernel."""
        asked, self.next_pdl = self.next_pdl, None
        return asked if asked and can_read_before_wait and self.pdl and self.dependent else self.pdl
