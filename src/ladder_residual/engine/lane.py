"""A lane's copy of the residual stream."""

from __future__ import annotations

import torch
from torch import Tensor


class Lane:
    """Float32 stream (rows, hidden) in two buffers: the kernel that absorbs outputs reads one and writes the other, because all
    of its programs read the old stream while one of them stores the new one. ``aside``: a third for what is not kept."""

    def __init__(self, rows: int, hidden: int, device: torch.device | str, *, aside: bool = False) -> None:
        # poisoned, so that a schedule which reads the stream before it was written shows NaN instead of plausible zeros
        self._buffers = [torch.full((rows, hidden), float("nan"), device=device) for _ in range(3 if aside else 2)]
        self._current = 0

    @property
    def stream(self) -> Tensor:
        return self._buffers[self._current]

    def advance(self, *, aside: bool = False) -> tuple[Tensor, Tensor]:
        """(old, new) stream buffers; the new one is current from here on, or, ``aside``, nobody's."""
        old = self._buffers[self._current]
        if aside:
            return old, self._buffers[2]
        self._current ^= 1
        return old, self._buffers[self._current]
