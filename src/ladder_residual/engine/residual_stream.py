"""A chain's copy of the residual stream."""

from __future__ import annotations

import torch
from torch import Tensor


class ResidualStream:
    """Float32 (rows, hidden) in two buffers: all programs of a kernel read the old stream while one of them stores the new one."""

    def __init__(self, rows: int, hidden: int, device: torch.device | str) -> None:
        # NaN, so that a schedule which reads the stream before it was written fails its tests
        self._buffers = [torch.full((rows, hidden), float("nan"), device=device) for _ in range(2)]
        self._current = 0

    @property
    def current(self) -> Tensor:
        return self._buffers[self._current]

    def advance(self, *, stores: bool = True) -> tuple[Tensor, Tensor]:
        """(old, new) buffers for the next kernel; the same one twice if it ``stores`` none."""
        old = self.current
        self._current ^= stores
        return old, self.current
