"""The time of one all-reduce by message size and number of ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

from ..common.recipe import Range
from .table import Curve, interpolate

Microseconds = Annotated[float, Range(0, 1e9)]
Contention = Annotated[float, Range(0, below=1)]  # 1 would stop all compute beside an all-reduce


@dataclass(frozen=True, kw_only=True)
class Link:
    """One all-reduce over a link: measured ``curves`` by number of ranks, or latency + bandwidth.

    ``us`` is the all-reduce itself, as a benchmark times it back to back; an emulated rank waits so long. ``in_situ_us`` is what a
    call costs inside a model beyond that (launch, ranks that arrive at different times); only the planner adds it, in
    ``in_model_us``. ``memory_contention`` and ``flop_contention`` are the shares of memory-bound and of FLOP-bound progress that
    compute loses while an all-reduce runs beside it.
    """

    name: str
    title: str = ""
    alpha_us: Microseconds = 0.0
    bandwidth_gbs: Annotated[float | None, Range(1e-9)] = None  # None: the size of a message does not matter
    ranks: Annotated[int, Range(0)] = 0  # that alpha_us was measured on: it grows with the depth of the tree. 0: it does not
    max_ranks: Annotated[int, Range(1)] = 4096
    in_situ_us: Microseconds = 0.0
    memory_contention: Contention = 0.0
    flop_contention: Contention = 0.0
    source: str = ""
    library: str = ""  # whose curves it takes from the table of all-reduces
    curves: Mapping[int, Curve] = field(default_factory=dict, repr=False)
    ring: bool = True  # bandwidth_gbs counts what a ring moves, 2 (ranks - 1) / ranks of the message; False: the message itself
    pdl: bool = True  # launched early (programmatic dependent launch), and so is what waits for it

    def us(self, size: float, ranks: int) -> float:
        """Microseconds of one all-reduce of ``size`` bytes (one rank's message)."""
        if ranks <= 1:
            return 0.0
        if ranks > self.max_ranks:
            raise ValueError(f"link {self.name} joins at most {self.max_ranks} ranks, tp={ranks} needs a link between nodes")
        if self.curves:
            return self._from_curves(size, ranks)
        depth = math.log2(ranks) / math.log2(self.ranks) if self.ranks > 1 else 1.0
        wire_bytes = 2 * (ranks - 1) / ranks * size if self.ring else size
        return self.alpha_us * depth + (wire_bytes / (self.bandwidth_gbs * 1e3) if self.bandwidth_gbs else 0.0)

    def in_model_us(self, size: float, ranks: int) -> float:
        return self.in_situ_us + self.us(size, ranks) if ranks > 1 else 0.0

    @property
    def silent(self) -> bool:
        """Whether an all-reduce takes no time at all."""
        return not self.curves and self.alpha_us == 0 and self.bandwidth_gbs is None

    def _from_curves(self, size: float, ranks: int) -> float:
        counts = sorted(self.curves)
        if ranks in self.curves:
            return interpolate(self.curves[ranks], size)
        if not counts[0] < ranks < counts[-1]:
            raise ValueError(f"link {self.name} was measured on {', '.join(map(str, counts))} GPUs, not on {ranks}")
        low = max(count for count in counts if count < ranks)
        high = min(count for count in counts if count > ranks)
        share = math.log(ranks / low) / math.log(high / low)
        low_us, high_us = interpolate(self.curves[low], size), interpolate(self.curves[high], size)
        return low_us * (1 - share) + high_us * share
