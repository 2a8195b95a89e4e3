"""A lane's copy of the residual stream."""

from __future__ import annotations

import torch
from torch import Tensor


class Lane:
    """Float32 stream (rows, hidden) in two buffers: the kernel that absorbs outputs reads one and writes the other, because all
    of its programs read the old stream while one of them stores the new one."""

    def __init__(self, rows: int, hidden: int, device: torch.device | str) -> None:
        # poisoned, so that a schedule which reads the stream before it was written shows NaN instead of plausible zeros
        self._buffers = [torch.full((rows, hidden), float("nan"), device=device) for _ in range(2)]
        self._current = 0

    @property
    def stream(self) -> Tensor:
        return self._buffers[self._current]

    def advance(self, *, stores: bool = True) -> tuple[Tensor, Tensor]:
        """(old, new) stream buffers; the new one is current from here on. One twice for a kernel that ``stores`` none."""
        old = self._buffers[self._current]
        self._current ^= stores
        return old, self._buffers[self._current]
