"""A rank's weights, stacked the way the kernels stream them: queries over keys over values, gate over up."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .quantized import QuantizedWeight, Weight, stacked
from .spec import EngineSpec, RankSizes

PROJECTIONS = ("qkv", "output", "gate_up", "down")  # of a layer: each a tensor or a QuantizedWeight


@dataclass(frozen=True)
class LayerWeights:
    input_norm: Tensor  # (hidden)
    post_attention_norm: Tensor  # (hidden)
    qkv: Any  # (heads + 2 * kv_heads) * head_dim x hidden
    output: Any  # hidden x heads * head_dim
    gate_up: Any  # 2 * intermediate x hidden
    down: Any  # hidden x intermediate
    qkv_bias: Tensor | None = None
    q_norm: Tensor | None = None  # (head_dim)
    k_norm: Tensor | None = None


@dataclass(frozen=True)
class RankWeights:
    embedding: Tensor  # vocab_rows x hidden
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor
    head: Any  # vocab_rows x hidden

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    @property
    def format(self) -> str | None:
        """Of quantised layers."""
        found = (getattr(layer, name) for layer in self.layers for name in PROJECTIONS)
        return next((weight.format for weight in found if isinstance(weight, QuantizedWeight)), None)

    @property
    def nbytes_per_step(self) -> int:
        """What a decode step reads of them."""
        held = [tensor for layer in self.layers for tensor in vars(layer).values() if tensor is not None]
        return sum(tensor.nbytes for tensor in (*held, self.final_norm, self.head))

    def with_projections(self, made: Callable[[Any], Weight]) -> RankWeights:
        """With other weights in the place of the layers' projections, made one by one."""

        def remade(layer: LayerWeights) -> LayerWeights:
            made_weights: dict[str, Any] = {name: made(getattr(layer, name)) for name in PROJECTIONS}
            return replace(layer, **made_weights)

        return replace(self, layers=tuple(map(remade, self.layers)))


def stack_weights(
    spec: EngineSpec, sizes: RankSizes, weights: MutableMapping[str, Weight] | Mapping[str, Weight], *, release: bool = False
) -> RankWeights:
    """From a rank's slices under Hugging Face names. ``release`` removes each tensor from ``weights`` once it is stacked, so
    that a shard which fills the GPU is never held twice."""

    def take(name: str, rows: int, columns: int | None = None) -> Any:
        if name not in weights:
            raise ValueError(f"the shard of rank {sizes.rank} lacks {name}")
        tensor = weights.pop(name) if release and isinstance(weights, MutableMapping) else weights[name]
        want = (rows,) if columns is None else (rows, columns)
        if tuple(tensor.shape) != want:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, rank {sizes.rank} of tp={sizes.tp} needs {want}")
        return tensor

    def take_vocabulary(name: str) -> Tensor:
        table = take(name, sizes.vocab_tokens, sizes.hidden)
        missing = sizes.vocab_rows - sizes.vocab_tokens
        # Zeros: the token of such a row is the next rank's, and the all-reduce must not count it twice.
        return F.pad(table, (0, 0, 0, missing)) if missing else table

    h, d = sizes.hidden, sizes.head_dim
    q, kv, ff = sizes.heads * d, sizes.kv_heads * d, sizes.intermediate
    embedding = take_vocabulary("model.embed_tokens.weight")
    layers = []
    for index in range(sizes.layers):
        at = f"model.layers.{index}."
        attn, mlp = at + "self_attn.", at + "mlp."
        qkv = [take(attn + f"{n}_proj.weight", rows, h) for n, rows in (("q", q), ("k", kv), ("v", kv))]
        bias = [take(attn + f"{n}_proj.bias", rows) for n, rows in (("q", q), ("k", kv), ("v", kv))] if spec.qkv_bias else []
        layers.append(
            LayerWeights(
                input_norm=take(at + "input_layernorm.weight", h),
                post_attention_norm=take(at + "post_attention_layernorm.weight", h),
                qkv=stacked(qkv),
                output=stacked([take(attn + "o_proj.weight", h, q)]),
                gate_up=stacked([take(mlp + f"{name}_proj.weight", ff, h) for name in ("gate", "up")]),
                down=stacked([take(mlp + "down_proj.weight", h, ff)]),
                qkv_bias=torch.cat(bias) if bias else None,
                q_norm=take(attn + "q_norm.weight", d) if spec.head_norm else None,
                k_norm=take(attn + "k_norm.weight", d) if spec.head_norm else None,
            )
        )
    tied = spec.shape.tied_embeddings and "lm_head.weight" not in weights
    head = embedding if tied else take_vocabulary("lm_head.weight")
    return RankWeights(embedding, tuple(layers), take("model.norm.weight", h), head)


def check_weights_stack(spec: EngineSpec, sizes: RankSizes, weights: Mapping[str, Weight]) -> None:
    """That ``stack_weights`` would take these weights, without touching them."""
    stack_weights(spec, sizes, {name: weight.to("meta") for name, weight in weights.items()})


def random_weights(
    spec: EngineSpec, tp: int, rank: int, dtype: torch.dtype, device: torch.device | str, *, seed: int = 0
) -> dict[str, Tensor]:
    """A rank's shard under Hugging Face names, for benchmarks and tests. Scaled so that activations stay of order one at any
    depth: random weights that blow up would hide errors behind infinities."""
    sizes = RankSizes.of(spec.shape, tp, rank)
    generator = torch.Generator(device=device).manual_seed(seed * 1009 + rank)
    h, d = sizes.hidden, sizes.head_dim
    q, kv, ff = sizes.heads * d, sizes.kv_heads * d, sizes.intermediate

    def normal(rows: int, columns: int, scale: float) -> Tensor:
        made = torch.empty(rows, columns, dtype=dtype, device=device)
        return made.normal_(0, scale, generator=generator)

    def near_one(size: int) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device).uniform_(0.5, 1.5, generator=generator)

    depth = (2 * sizes.layers) ** -0.5
    made = {"model.embed_tokens.weight": normal(sizes.vocab_tokens, h, 1.0)}
    for index in range(sizes.layers):
        at = f"model.layers.{index}."
        attn, mlp = at + "self_attn.", at + "mlp."
        for name, rows in (("q", q), ("k", kv), ("v", kv)):
            made[attn + f"{name}_proj.weight"] = normal(rows, h, h**-0.5)
            if spec.qkv_bias:
                made[attn + f"{name}_proj.bias"] = normal(1, rows, 0.3)[0]
        made[attn + "o_proj.weight"] = normal(h, q, depth * (q * tp) ** -0.5)
        made[mlp + "gate_proj.weight"] = normal(ff, h, h**-0.5)
        made[mlp + "up_proj.weight"] = normal(ff, h, h**-0.5)
        made[mlp + "down_proj.weight"] = normal(h, ff, depth * (ff * tp) ** -0.5)
        made[at + "input_layernorm.weight"] = near_one(h)
        made[at + "post_attention_layernorm.weight"] = near_one(h)
        if spec.head_norm:
            made[attn + "q_norm.weight"] = near_one(d)
            made[attn + "k_norm.weight"] = near_one(d)
    made["model.norm.weight"] = near_one(h)
    if not spec.shape.tied_embeddings:
        made["lm_head.weight"] = normal(sizes.vocab_tokens, h, h**-0.5)
    return made
