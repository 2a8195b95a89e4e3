"""What a model would do on a device, over a link, under each wiring: a ``Case`` is evaluated to a ``PlanRow``. No torch, no GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from ..common.suggest import did_you_mean
from ..core.config import Wiring
from ..links.link import Link
from ..models.presets import ModelShape
from .cost import KV_CACHE_BYTES, WEIGHT_BYTES, EngineProfile, Phase, RankCost, RankShape, engine
from .hardware import Device, Hardware, shipped
from .models import resolve_model, stored_weights
from .schedule import LayerCost, Timeline, build, simulate

TWO_STREAM = "ladder two-stream"
# Spec of each row of the table; two-stream is a schedule of the ladder wiring, not a wiring of its own.
WIRINGS = ("standard", "ladder", TWO_STREAM, "ladder:last-half", "parallel", "desync-2x", "desync-4x", "delayed-1", "no-comm")
DEFAULT_ENGINE = "fused"
MOST_TOKENS = 10**9
EDGE_COLLECTIVES = 2  # of a sharded vocabulary: the all-reduce of the embeddings, the gathering of the logits


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
    weights: str = "bf16"  # of the layers' matrices
    kv_cache: str = "bf16"
    real_ranks: bool = True  # False for an emulated rank, which has no collectives at the edges of the model

    def __post_init__(self) -> None:
        for name in ("batch", "prompt", "new"):
            value = getattr(self, name)
            if not 1 <= value <= MOST_TOKENS:
                raise ValueError(f"{name} must be at least 1 and at most {MOST_TOKENS:,}, got {value!r:.40}")
        for option, value, known in (
            ("weights", self.weights, WEIGHT_BYTES),
            ("kv-cache-dtype", self.kv_cache, KV_CACHE_BYTES),
        ):
            if value not in known:
                raise ValueError(f"unknown {option} {value!r}{did_you_mean(value, known)}; choose {', '.join(known)}")

    def rank(self) -> RankCost:
        return RankCost(RankShape(self.model, self.tp), self.device, self.engine, self.weights, self.kv_cache)

    def prefill_phase(self) -> Phase:
        return Phase(self.batch, self.prompt, self.prompt)

    def decode_phase(self) -> Phase:
        """The average decode step: costs grow linearly with the context, so its middle stands for all of them."""
        context = self.prompt + self.new if self.engine.static_cache else self.prompt + self.new / 2
        return Phase(self.batch, 1, context)

    def timeline(self, wiring: str, phase: Phase) -> Timeline:
        """The simulated forward pass of ``phase``."""
        if wiring.endswith(":last-half") and self.model.num_layers < 2:
            wiring = "standard"  # half of one layer is none
        two_stream = wiring == TWO_STREAM
        if two_stream and not self.engine.stream_overlap:
            raise ValueError(f"engine {self.engine.name} has no two-stream schedule")
        rank = self.rank()
        size = rank.message_bytes(phase)
        allreduce_us = self.link.in_model_us(size, self.tp)
        cost = LayerCost(
            attention=rank.attention(phase),
            mlp=rank.mlp(phase),
            allreduce_us=allreduce_us,
            link=self.link,
            fused_saving_us=self.engine.parallel_saving * self.engine.module_us,
            communicators=self.engine.communicators,
            wire_share=1 - self.link.in_model_us(1, self.tp) / allreduce_us if allreduce_us else 0.0,
        )
        edges = EDGE_COLLECTIVES if self.engine.sharded_vocabulary and self.real_ranks else 0
        spec = Wiring.parse("ladder" if two_stream else wiring, self.model.num_layers)
        tasks = build(spec, cost, head=rank.head(phase), two_stream=two_stream, edge_us=edges * allreduce_us)
        return simulate(tasks, self.engine.stream_overlap if two_stream else 1.0)

    def seconds(self, wiring: str) -> tuple[float, float]:
        """(prefill, all decode steps); the prefill gives the first new token."""
        # A prefill keeps the matrix units busy by itself, so a second stream has nothing to fill there.
        prefill = self.timeline("ladder" if wiring == TWO_STREAM else wiring, self.prefill_phase()).us
        decode = self.timeline(wiring, self.decode_phase()).us * (self.new - 1) if self.new > 1 else 0.0
        return prefill / 1e6, decode / 1e6

    def tokens_per_second(self, wiring: str) -> float:
        return self.batch * self.new / sum(self.seconds(wiring))

    def wirings(self) -> tuple[str, ...]:
        return tuple(name for name in WIRINGS if name != TWO_STREAM or self.engine.stream_overlap)

    def memory_gb(self) -> dict[str, float]:
        return {part: size / 1e9 for part, size in self.rank().memory_bytes(self.batch, self.prompt, self.new).items()}


@dataclass(frozen=True, kw_only=True)
class PlanRow:
    """What one case gives."""

    case: Case = field(repr=False)
    model: str
    device: str
    link: str
    engine: str
    tp: int
    batch: int
    prompt: int
    new: int
    weights: str
    kv_cache_dtype: str
    tokens_per_second: dict[str, float]  # by wiring, prefill included
    ms_per_token: dict[str, float]  # by wiring: one decode step
    step_ms: dict[str, dict[str, float]]  # by wiring: that step as compute, hidden and exposed all-reduces
    prefill_ms: dict[str, float]
    speedup: dict[str, float]  # over standard, whole generation
    hidden_percent: dict[str, float]  # of the communication time of a decode step
    allreduce_us: float  # one all-reduce of a decode step, by itself
    in_situ_us: float  # what it costs more inside a model
    limits: dict[str, float]  # per cent of a standard decode step: memory, FLOPs, gaps, waiting for all-reduces
    limited_by: str
    memory_gb: dict[str, float]
    fits: bool
    advice: str = ""  # one sentence: convert or not, and why

    @property
    def memory_total_gb(self) -> float:
        return sum(self.memory_gb.values())

    def to_dict(self) -> dict[str, Any]:
        values = {one.name: getattr(self, one.name) for one in fields(self) if one.name != "case"}
        return {**values, "memory_total_gb": self.memory_total_gb}


def evaluate_all(cases: Sequence[tuple[str, Case]]) -> list[PlanRow]:
    """A row per case. Raises ValueError if none fits its device's memory."""
    rows = [evaluate(name, case) for name, case in cases]
    if not any(row.fits for row in rows):
        best = min(rows, key=lambda row: row.memory_total_gb)
        room = cases[0][1].device.memory_gb
        raise ValueError(
            f"{best.model} does not fit: a rank of tp={best.tp} with batch {best.batch} needs {best.memory_total_gb:.0f} GB "
            f"({best.memory_gb['weights']:.0f} GB of weights, {best.memory_gb['kv_cache']:.0f} GB of cache), "
            f"{best.device} has {room:.0f} GB; use more ranks, a smaller batch or a larger device"
        )
    return rows


def make_cases(
    model: str | ModelShape,
    *,
    device: str,
    tp: Sequence[int],
    link: Sequence[str],
    batch: Sequence[int],
    prompt: int,
    new: int,
    engine_name: str | None = None,
    hardware: Hardware | None = None,
    weights: str | None = None,
    kv_cache: str = "bf16",
) -> list[tuple[str, Case]]:
    """(model name, case) for every combination, checked."""
    hardware = hardware or shipped()
    name, shape = (model.family, model) if isinstance(model, ModelShape) else resolve_model(model)
    if weights is None:
        weights = "bf16" if isinstance(model, ModelShape) else stored_weights(model)
    place = hardware.device(device)
    profile = engine_on(place, engine_name)
    links = [hardware.link(one, place) for one in link]
    if not (tp and link and batch):
        raise ValueError("give at least one tp, one link and one batch")
    asked: dict[str, Any] = dict(model=shape, device=place, engine=profile, weights=weights, kv_cache=kv_cache)
    cases = [
        (name, Case(**asked, link=one, tp=ranks, batch=size, prompt=prompt, new=new))
        for ranks in tp
        for one in links
        for size in batch
    ]
    for _, case in cases:
        case.rank()  # refuses a tp that does not divide the model
        case.link.us(1024, case.tp)  # refuses a tp the link was not measured on
    return cases


def engine_on(device: Device, name: str | None = None) -> EngineProfile:
    """The engine profile; a device that was calibrated with it brings its own gaps."""
    profile = engine(name or device.engine or DEFAULT_ENGINE)
    measured = {key: getattr(device, key) for key in ("module_us", "module_us_batched") if getattr(device, key)}
    return replace(profile, **measured) if profile.name == device.engine else profile


def evaluate(name: str, case: Case) -> PlanRow:
    decode = case.decode_phase()
    speeds, steps, parts, prefills, hidden = {}, {}, {}, {}, {}
    for wiring in case.wirings():
        seconds = case.seconds(wiring)
        step = case.timeline(wiring, decode)
        speeds[wiring] = case.batch * case.new / sum(seconds)
        steps[wiring], prefills[wiring] = step.us / 1e3, seconds[0] * 1e3
        parts[wiring] = {part: us / 1e3 for part, us in step.breakdown_us().items()}
        hidden[wiring] = 100 * step.hidden_share()
    limits = step_limits(case, decode)
    memory = case.memory_gb()
    return PlanRow(
        case=case,
        model=name,
        device=case.device.name,
        link=case.link.name,
        engine=case.engine.name,
        tp=case.tp,
        batch=case.batch,
        prompt=case.prompt,
        new=case.new,
        weights=case.weights,
        kv_cache_dtype=case.kv_cache,
        tokens_per_second=speeds,
        ms_per_token=steps,
        step_ms=parts,
        prefill_ms=prefills,
        speedup={wiring: speed / speeds["standard"] for wiring, speed in speeds.items()},
        hidden_percent=hidden,
        allreduce_us=case.link.us(case.rank().message_bytes(decode), case.tp),
        in_situ_us=case.link.in_situ_us if case.tp > 1 else 0.0,
        limits=limits,
        limited_by=max(limits, key=limits.__getitem__),
        memory_gb=memory,
        fits=sum(memory.values()) <= case.device.memory_gb,
    )


def step_limits(case: Case, phase: Phase) -> dict[str, float]:
    """Where the time of a standard forward pass goes, in per cent."""
    rank, layers = case.rank(), case.model.num_layers
    work = rank.head(phase)
    for _ in range(layers):
        work = work.plus(rank.attention(phase)).plus(rank.mlp(phase))
    total = case.timeline("standard", phase).us
    parts = {"memory": work.memory_us, "FLOPs": work.flop_us, "launch gaps": work.overhead_us, "all-reduce": total - work.us}
    return {part: 100 * us / total for part, us in parts.items()}


def hybrid_curve(case: Case) -> list[tuple[int, float]]:
    """(number of converted layers, speed-up over standard), converting the last k layers."""
    layers = case.model.num_layers
    counts = sorted({round(layers * i / 16) for i in range(17)})
    standard = case.tokens_per_second("standard")
    return [(k, case.tokens_per_second(f"ladder:last-{k}" if k else "standard") / standard) for k in counts]
