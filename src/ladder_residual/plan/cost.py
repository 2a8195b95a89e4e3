"""Time and memory of one module on one tensor-parallel rank.

A matrix kernel takes the longer of reading its bytes and doing its FLOPs at the rates the device *achieves*; a module adds the
gaps between its kernels (``EngineProfile.module_us``), which is the whole cost of a small one. Units: microseconds and bytes.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import NamedTuple

from ..common.recipe import build_named
from ..common.suggest import did_you_mean
from ..models.families import FAMILIES, PREFIX
from ..models.presets import ModelShape
from ..models.sharding import check_divides
from .hardware import Device

DTYPE_BYTES = 2  # fp16 and bf16: activations, embeddings, the head, and whatever is not quantised
# Of a number in a layer's matrices. int4 has a 16-bit scale for every 128; fp8 one for a row, which is nothing beside it.
WEIGHT_BYTES = {"bf16": 2.0, "fp8": 1.0, "int4": 0.5 + 2 / 128}
KV_CACHE_BYTES = {"bf16": 2, "fp8": 1}
# A GEMM with few rows fills only part of the matrix units: it costs as much as one with a tile more rows.
TILE_ROWS = 64
RUNTIME_BYTES = 1.5e9  # CUDA context, communication buffers, graphs


@dataclass(frozen=True, kw_only=True)
class EngineProfile:
    """See ``assets/plan/engines.toml`` for what each number means and where it comes from."""

    name: str
    title: str
    read_share: float
    module_us: float
    module_us_batched: float
    attention_share: float
    multiply_share: float = 1.0
    adds_up: bool = False
    # Two of about six small kernels of a module go away when attention and MLP share their input.
    parallel_saving: float = 1 / 3
    communicators: int = 1
    stream_overlap: float = 0.0  # 0: the engine has no two-stream schedule
    kv_reads_per_head: bool = False
    static_cache: bool = False
    sharded_vocabulary: bool = True
    head_on_prompt: bool = False
    source: str = ""


@cache
def engines() -> dict[str, EngineProfile]:
    text = resources.files("ladder_residual").joinpath("assets/plan/engines.toml").read_text()
    return build_named(EngineProfile, tomllib.loads(text)["engines"], "engines", "engines.toml")


def engine(name: str) -> EngineProfile:
    if name not in engines():
        raise ValueError(f"unknown engine {name!r}{did_you_mean(name, engines())}; choose from {', '.join(engines())}")
    return engines()[name]


class Work(NamedTuple):
    """Microseconds of one piece of compute by what limits it."""

    memory_us: float = 0.0
    flop_us: float = 0.0
    overhead_us: float = 0.0

    @property
    def us(self) -> float:
        return self.memory_us + self.flop_us + self.overhead_us

    def plus(self, other: Work) -> Work:
        return Work(*(a + b for a, b in zip(self, other, strict=True)))


class Phase(NamedTuple):
    """One forward pass: ``tokens`` new tokens of each of ``batch`` sequences, ``context`` tokens in the cache afterwards."""

    batch: int
    tokens: int
    context: float

    @property
    def rows(self) -> int:
        return self.batch * self.tokens


@dataclass(frozen=True)
class RankShape:
    """A rank's share of a model; refuses a number of ranks that does not divide it."""

    model: ModelShape
    tp: int

    def __post_init__(self) -> None:
        check_divides(self.model, FAMILIES.get(self.model.family.removeprefix(PREFIX)), self.tp, uneven=None)
        if experts := self.model.experts:
            for size in (experts.size, experts.shared_size):
                if size % self.tp:
                    raise ValueError(f"tp={self.tp} does not divide the {size} neurons of an expert")

    @property
    def heads(self) -> int:
        return self.model.num_heads // self.tp

    @property
    def kv_heads(self) -> int:
        return max(1, self.model.num_kv_heads // self.tp)  # replicated when there are more ranks than KV heads

    @property
    def columns(self) -> int:
        return self.model.intermediate_size // self.tp

    @property
    def attention_parameters(self) -> int:
        return self.model.hidden_size * self.model.head_dim * (2 * self.heads + 2 * self.kv_heads)

    @property
    def mlp_parameters(self) -> int:
        if experts := self.model.experts:
            columns = (experts.count * experts.size + experts.shared_size) // self.tp
            return self.model.hidden_size * (3 * columns + experts.count)  # every rank has the whole router
        return self.model.hidden_size * self.columns * (3 if self.model.gated_mlp else 2)

    @property
    def columns_per_token(self) -> int:
        """Neurons that a token's activations go through."""
        if experts := self.model.experts:
            return (experts.per_token * experts.size + experts.shared_size) // self.tp
        return self.columns


@dataclass(frozen=True)
class RankCost:
    """Cost of the modules of one rank on a device with an engine."""

    shape: RankShape
    device: Device
    engine: EngineProfile
    weights: str = "bf16"  # of the layers' matrices
    kv_cache: str = "bf16"

    def kv_bytes_per_token(self) -> int:
        """Of one layer and one sequence: keys and values."""
        return 2 * self.shape.kv_heads * self.shape.model.head_dim * KV_CACHE_BYTES[self.kv_cache]

    def attention(self, phase: Phase) -> Work:
        """Projections and attention over the cache, without any all-reduce."""
        model, share = self.shape.model, self.engine.attention_share
        qkv = self.shape.heads + 2 * self.shape.kv_heads
        stored = WEIGHT_BYTES[self.weights]
        work = self._gemm(phase.rows, model.hidden_size, qkv * model.head_dim, stored)
        work = work.plus(self._cache(phase))
        work = work.plus(self._gemm(phase.rows, self.shape.heads * model.head_dim, model.hidden_size, stored))
        return work.plus(Work(overhead_us=2 * share * self._module_us(phase)))

    def mlp(self, phase: Phase) -> Work:
        model, rows = self.shape.model, phase.rows
        gaps = Work(overhead_us=2 * (1 - self.engine.attention_share) * self._module_us(phase))
        experts = model.experts
        if experts is None:
            return self._up_and_down(rows, self.shape.columns).plus(gaps)
        work = gaps.plus(self._gemm(rows, model.hidden_size, experts.count, DTYPE_BYTES))  # the router
        if experts.shared_size:
            work = work.plus(self._up_and_down(rows, experts.shared_size // self.shape.tp))
        chosen = self._up_and_down(rows * experts.per_token, experts.size // self.shape.tp, matrices=experts.read(rows))
        return work.plus(chosen)

    def _up_and_down(self, rows: int, columns: int, matrices: float = 1.0) -> Work:
        """``matrices`` MLPs that share ``rows`` rows out."""
        hidden, stored = self.shape.model.hidden_size, WEIGHT_BYTES[self.weights]
        up = self._gemm(rows, hidden, columns * (2 if self.shape.model.gated_mlp else 1), stored, matrices)
        return up.plus(self._gemm(rows, columns, hidden, stored, matrices))

    def head(self, phase: Phase) -> Work:
        """Logits: of the last token of each sequence, unless the engine computes those of the whole prompt."""
        rows = phase.rows if self.engine.head_on_prompt else phase.batch
        ranks = self.shape.tp if self.engine.sharded_vocabulary else 1
        return self._gemm(rows, self.shape.model.hidden_size, self.shape.model.vocab_size / ranks, DTYPE_BYTES)

    def message_bytes(self, phase: Phase) -> int:
        return phase.rows * self.shape.model.hidden_size * DTYPE_BYTES

    def memory_bytes(self, batch: int, prompt: int, new: int) -> dict[str, float]:
        """Bytes a rank needs: weights, KV cache, the largest activations of a prefill, and the runtime's own."""
        model, shape = self.shape.model, self.shape
        ranks = shape.tp if self.engine.sharded_vocabulary else 1
        vocabulary = model.vocab_size * model.hidden_size * (1 if model.tied_embeddings else 2) / ranks
        matrices, norms = shape.attention_parameters + shape.mlp_parameters, 2 * model.hidden_size
        layer = WEIGHT_BYTES[self.weights] * matrices + DTYPE_BYTES * norms
        rows = batch * prompt
        widest = max(2 * shape.columns_per_token, (shape.heads + 2 * shape.kv_heads) * model.head_dim)
        logits = (rows if self.engine.head_on_prompt else batch) * model.vocab_size / ranks
        return {
            "weights": model.num_layers * layer + DTYPE_BYTES * vocabulary,
            "kv_cache": float(model.num_layers * batch * (prompt + new) * self.kv_bytes_per_token()),
            "activations": DTYPE_BYTES * (rows * (3 * model.hidden_size + widest) + logits),
            "runtime": RUNTIME_BYTES,
        }

    def _module_us(self, phase: Phase) -> float:
        return self.engine.module_us if phase.rows == 1 else self.engine.module_us_batched

    def _bandwidth(self) -> float:
        """Bytes per microsecond that kernels of this engine read."""
        return self.device.bandwidth_gbs * 1e3 * self.device.bandwidth_share * self.engine.read_share

    def _flop_rate(self) -> float:
        return self.device.tflops * 1e6 * self.device.flop_share * self.engine.multiply_share

    def _gemm(self, rows: int, inner: float, columns: float, weight_bytes: float, matrices: float = 1.0) -> Work:
        """Quantised weights are multiplied as bf16: they save reading, not FLOPs."""
        weights = weight_bytes * inner * columns * matrices
        read = (weights + DTYPE_BYTES * rows * (inner + columns)) / self._bandwidth()
        if rows > matrices + 1e-6:  # more than one row each
            read /= self.device.batched_read_share
        if self.engine.adds_up:
            return Work(memory_us=read, flop_us=2.0 * rows * inner * columns / self._flop_rate())
        multiply = 2.0 * (rows + TILE_ROWS * matrices) * inner * columns / self._flop_rate()
        return Work(memory_us=read) if read >= multiply else Work(flop_us=multiply)

    def _cache(self, phase: Phase) -> Work:
        repeats = self.shape.heads / self.shape.kv_heads if self.engine.kv_reads_per_head else 1.0
        read = phase.batch * phase.context * self.kv_bytes_per_token() * repeats / self._bandwidth()
        # Scores and values: every query token against the tokens before it (half of the square in a prefill).
        pairs = phase.batch * phase.tokens * (phase.context - (phase.tokens - 1) / 2)
        multiply = 4.0 * pairs * self.shape.heads * self.shape.model.head_dim / self._flop_rate()
        return Work(memory_us=read) if read >= multiply else Work(flop_us=multiply)
