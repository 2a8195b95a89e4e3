"""What the engine must know of a model beyond its sizes, and a rank's share of those sizes, checked before anything is allocated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..models.presets import ModelShape
from ..models.sharding import split

HEAD_DIMS = (64, 128, 256)  # tiles of the attention kernel are powers of two
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
ROPE_TYPES = ("default", "linear", "llama3")


@dataclass(frozen=True, kw_only=True)
class EngineSpec:
    """A decoder as the engine sees it: the published shape plus rope, norm and bias details (all global, never a rank's share)."""

    shape: ModelShape
    rope_theta: float = 10_000.0
    rope_scaling: Mapping[str, Any] = field(default_factory=dict)  # Hugging Face's rope parameters, with "rope_type"
    norm_eps: float = 1e-5
    qkv_bias: bool = False  # Qwen2
    head_norm: bool = False  # Qwen3: RMSNorm on each query and key head

    def __post_init__(self) -> None:
        shape = self.shape
        family = shape.family.removeprefix("ladder_")
        if family not in FAMILIES:
            raise ValueError(f"the CUDA engine runs {', '.join(FAMILIES)} models, not {shape.family!r}: use the slow path")
        if not shape.gated_mlp:
            raise ValueError("the CUDA engine needs a gated MLP (gate, up, down)")
        if shape.head_dim not in HEAD_DIMS:
            raise ValueError(f"head size {shape.head_dim} is not one of {HEAD_DIMS}: use the slow path")
        if shape.num_heads % shape.num_kv_heads:
            raise ValueError(f"{shape.num_heads} heads do not divide into {shape.num_kv_heads} KV heads")
        kind = self.rope_scaling.get("rope_type", "default")
        if kind not in ROPE_TYPES:
            raise ValueError(f"rope type {kind!r} is not one of {', '.join(ROPE_TYPES)}: use the slow path")

    @classmethod
    def from_shape(cls, shape: ModelShape, **details: Any) -> EngineSpec:
        """The family's usual details for a preset, for benchmarks on random weights."""
        family = shape.family.removeprefix("ladder_")
        usual: dict[str, Any] = {"rope_theta": 500_000.0 if shape.vocab_size == 128256 else 10_000.0}
        usual.update(qkv_bias=family == "qwen2", head_norm=family == "qwen3")
        return cls(shape=shape, **{**usual, **details})

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], *, max_context: int | None = None) -> EngineSpec:
        """From a Hugging Face ``config.json`` (transformers 4 or 5 spelling of the rope fields). A sliding window is no hindrance to a
        ``max_context`` that it spans."""
        shape = ModelShape.from_hf(config)
        rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
        rope.setdefault("rope_type", rope.pop("type", "default"))
        window = config.get("sliding_window") if config.get("use_sliding_window", True) else None
        if window and (max_context is None or max_context > window):
            raise ValueError(
                f"sliding_window={window}: the CUDA engine attends to the whole context, so it takes at most {window} tokens"
                + (f", not {max_context}" if max_context else "")
            )
        activation = config.get("hidden_act", "silu")
        if activation not in ("silu", "swish"):
            raise ValueError(f"hidden_act={activation!r:.40}: the CUDA engine computes silu")
        if config.get("mlp_bias") or (config.get("attention_bias") and "qwen2" not in shape.family):
            raise ValueError("biases on output or MLP projections: the CUDA engine has them on Qwen2's QKV only")
        return cls(
            shape=shape,
            rope_theta=float(rope.get("rope_theta") or config.get("rope_theta") or 10_000.0),
            rope_scaling=rope,
            norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            qkv_bias=shape.family.removeprefix("ladder_") == "qwen2",
            head_norm=shape.family.removeprefix("ladder_") == "qwen3",
        )


@dataclass(frozen=True)
class RankSizes:
    """One rank's share of the sizes."""

    tp: int
    rank: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab_rows: int  # of the longest shard; a shorter one ends in a row of zeros, so that all ranks' buffers are alike
    vocab_first: int
    vocab_tokens: int  # rows that are tokens

    @classmethod
    def of(cls, shape: ModelShape, tp: int, rank: int) -> RankSizes:
        if tp < 1 or not 0 <= rank < tp:
            raise ValueError(f"rank {rank} of tp={tp} does not exist: ranks go from 0 to tp - 1")
        for name, size in (("num_heads", shape.num_heads), ("intermediate_size", shape.intermediate_size)):
            if size % tp:
                raise ValueError(f"{name}={size} does not divide into tp={tp} ranks")
        if shape.num_kv_heads % tp and tp % shape.num_kv_heads:
            raise ValueError(f"num_kv_heads={shape.num_kv_heads} neither divides into tp={tp} ranks nor replicates evenly")
        first, last = split(shape.vocab_size, tp, rank)
        return cls(
            tp=tp,
            rank=rank,
            hidden=shape.hidden_size,
            layers=shape.num_layers,
            heads=shape.num_heads // tp,
            kv_heads=max(shape.num_kv_heads // tp, 1),
            head_dim=shape.head_dim,
            intermediate=shape.intermediate_size // tp,
            vocab_rows=-(-shape.vocab_size // tp),
            vocab_first=first,
            vocab_tokens=last - first,
        )

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.heads // self.kv_heads

    @property
    def qkv_width(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    def weight_bytes(self, element: int) -> int:
        """What a decode step reads: every layer's projections and norms, and the head (the embedding's rows do not count)."""
        attention = self.hidden * self.qkv_width + self.hidden * self.heads * self.head_dim
        mlp = 3 * self.hidden * self.intermediate
        return element * (self.layers * (attention + mlp + 2 * self.hidden) + self.hidden * (self.vocab_rows + 1))

    def resident_bytes(self, element: int, *, tied: bool) -> int:
        """What the GPU holds of weights: the above, and the embedding unless it is the head."""
        return self.weight_bytes(element) + (0 if tied else element * self.hidden * self.vocab_rows)

    def cache_bytes(self, element: int, batch: int, context: int, kv_cache_dtype: str = "auto") -> int:
        a_head = self.head_dim + 2 if kv_cache_dtype == "fp8" else element * self.head_dim  # two bytes of scale
        return 2 * self.layers * batch * self.kv_heads * context * a_head
