"""``plan``: what a model would do on a device, over a link, under each wiring. No torch, no GPU.

    >>> [row] = plan("llama-3-70b", device="h100", tp=[8], link=["nccl"], batch=[1])
    >>> row.speedup["ladder"] > 1.2
    True
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from ..config import Wiring
from ..presets import ModelShape
from .cost import EngineProfile, Phase, RankCost, RankShape, Work, engine, engines
from .hardware import Device, Hardware, Link, shipped
from .models import resolve_model
from .schedule import LayerCost, Timeline, build, simulate

TWO_LANES = "ladder two-lane"
# Spec of each row of the table; two lanes is a schedule of the ladder wiring, not a wiring of its own.
WIRINGS = ("standard", "ladder", TWO_LANES, "ladder:last-half", "parallel", "desync-2x", "desync-4x", "delayed-1", "no-comm")
DEFAULT_ENGINE = "fused"
EDGE_COLLECTIVES = 2  # of a sharded vocabulary: the sum of the embeddings, the gathering of the logits


@dataclass(frozen=True, kw_only=True)
class Case:
    """One thing to time: a model on one rank of ``tp``, over a link, with a batch."""

    model: ModelShape
    device: Device
    link: Link
    engine: EngineProfile
    tp: int
    batch: int
    prompt: int
    new: int
    real_ranks: bool = True  # False for an emulated rank, which has no collectives at the edges of the model

    def __post_init__(self) -> None:
        for name in ("batch", "prompt", "new"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")

    def rank(self) -> RankCost:
        return RankCost(RankShape(self.model, self.tp), self.device, self.engine)

    def prefill_phase(self) -> Phase:
        return Phase(self.batch, self.prompt, self.prompt)

    def decode_phase(self) -> Phase:
        """The average decode step: costs grow linearly with the context, so its middle stands for all of them."""
        context = self.prompt + self.new if self.engine.static_cache else self.prompt + self.new / 2
        return Phase(self.batch, 1, context)

    def timeline(self, wiring: str, phase: Phase) -> Timeline:
        """The simulated forward pass of ``phase``."""
        two_lanes = wiring == TWO_LANES
        if two_lanes and not self.engine.lane_bandwidth:
            raise ValueError(f"engine {self.engine.name} has no two-lane schedule")
        rank = self.rank()
        size = rank.message_bytes(phase)
        cost = LayerCost(
            attention=rank.attention(phase),
            mlp=rank.mlp(phase),
            allreduce_us=self.link.us(size, self.tp),
            link=self.link,
            fused_saving_us=2 * self.engine.module_us / 6,
        )
        edges = EDGE_COLLECTIVES if self.engine.sharded_vocabulary and self.real_ranks else 0
        spec = Wiring.parse("ladder" if two_lanes else wiring, self.model.num_layers)
        tasks = build(spec, cost, head=rank.head(phase), two_lanes=two_lanes, edge_us=edges * self.link.us(size, self.tp))
        return simulate(tasks, self.engine.lane_bandwidth if two_lanes else 1.0)

    def seconds(self, wiring: str) -> tuple[float, float]:
        """(prefill, all decode steps); the prefill gives the first new token."""
        # A prefill keeps the matrix units busy by itself, so two lanes have nothing to fill there.
        prefill = self.timeline("ladder" if wiring == TWO_LANES else wiring, self.prefill_phase()).us
        decode = self.timeline(wiring, self.decode_phase()).us * (self.new - 1) if self.new > 1 else 0.0
        return prefill / 1e6, decode / 1e6

    def tokens_per_second(self, wiring: str) -> float:
        return self.batch * self.new / sum(self.seconds(wiring))

    def wirings(self) -> tuple[str, ...]:
        return tuple(name for name in WIRINGS if name != TWO_LANES or self.engine.lane_bandwidth)
