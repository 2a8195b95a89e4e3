"""Published model shapes by name, for planning and benchmarks. One table, in ``assets/presets.json``; no torch.

A shape is what speed depends on: sizes, not weights. Any Hugging Face ``config.json`` of a decoder gives one too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import cache
from importlib import resources
from typing import Any

from ..common.suggest import did_you_mean

_EXPERT_FAMILIES = ("mixtral", "qwen2_moe", "qwen3_moe")


@dataclass(frozen=True, kw_only=True)
class Experts:
    """The gated MLPs of a mixture's layer, of which each token takes some."""

    count: int
    per_token: int
    size: int  # neurons of one
    shared_size: int = 0  # neurons that every token takes

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if type(value) is not int or value < (field.name != "shared_size"):
                raise ValueError(f"experts: {field.name} must be a positive whole number, got {value!r:.40}")
        if self.per_token > self.count:
            raise ValueError(f"experts: a token cannot take {self.per_token} of {self.count}")

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Experts | None:
        """Of a mixture's ``config.json``; None if it is no mixture, or leaves its sizes to a family's defaults."""
        family = str(config.get("model_type")).removeprefix("ladder_")
        count = config.get("num_local_experts" if family == "mixtral" else "num_experts")
        size = config.get("intermediate_size" if family == "mixtral" else "moe_intermediate_size")
        per_token = config.get("num_experts_per_tok")
        if family not in _EXPERT_FAMILIES or None in (count, size, per_token):
            return None
        shared = (config.get("shared_expert_intermediate_size") or 0) if family == "qwen2_moe" else 0
        return cls(count=count, per_token=per_token, size=size, shared_size=shared)  # type: ignore[arg-type]  # None is ruled out

    def to_hf(self, family: str) -> dict[str, Any]:
        if family == "mixtral":
            return {"num_local_experts": self.count, "num_experts_per_tok": self.per_token}
        shared = {"shared_expert_intermediate_size": self.shared_size} if self.shared_size else {}
        return {
            "num_experts": self.count,
            "num_experts_per_tok": self.per_token,
            "moe_intermediate_size": self.size,
            **shared,
        }

    def read(self, tokens: int) -> float:
        """How many of them ``tokens`` tokens need together, if each chooses by chance."""
        return self.count * (1 - (1 - self.per_token / self.count) ** tokens)


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Global sizes of a decoder (never a rank's share of them)."""

    family: str  # Hugging Face model_type
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    tied_embeddings: bool = False
    gated_mlp: bool = True  # gate, up and down; otherwise up and down
    experts: Experts | None = None  # of every layer

    def __post_init__(self) -> None:
        if isinstance(self.experts, Mapping):
            object.__setattr__(self, "experts", Experts(**self.experts))
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type == "int" and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise ValueError(f"{field.name} must be a positive whole number, got {value!r:.40}")

    @classmethod
    def from_name(cls, name: str) -> ModelShape:
        table = presets()
        if name not in table:
            raise ValueError(f"unknown preset {name!r}{did_you_mean(name, table)}; choose from {', '.join(table)}")
        return table[name]

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> ModelShape:
        """The shape of a Hugging Face ``config.json``; says which fields are missing."""
        names = {
            "family": ("model_type",),
            "hidden_size": ("hidden_size", "n_embd"),
            "intermediate_size": ("intermediate_size", "n_inner"),
            "num_layers": ("num_hidden_layers", "n_layer"),
            "num_heads": ("num_attention_heads", "n_head"),
            "vocab_size": ("vocab_size",),
        }
        found: dict[str, Any] = {
            key: next((config[n] for n in options if config.get(n) is not None), None) for key, options in names.items()
        }
        missing = [names[key][0] for key, value in found.items() if value is None]
        if missing:
            raise ValueError(f"config.json of model_type {config.get('model_type')!r} lacks {', '.join(missing)}")
        heads, hidden = found["num_heads"], found["hidden_size"]
        for name, value in (("num_attention_heads", heads), ("hidden_size", hidden)):
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"config.json: {name} must be a positive whole number, got {value!r:.40}")
        return cls(
            **found,
            num_kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or hidden // heads,
            tied_embeddings=bool(config.get("tie_word_embeddings", False)),
            gated_mlp=found["family"].removeprefix("ladder_") not in ("gpt_neox", "starcoder2", "bloom", "nemotron"),
            experts=Experts.from_hf(config),
        )

    def require_dense(self, who: str) -> None:
        if self.experts:
            raise ValueError(f"{who} takes dense models, and this {self.family} is a mixture of {self.experts.count} experts")

    @property
    def attention_parameters(self) -> int:
        """Per layer: query, key, value and output projections."""
        return self.hidden_size * self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)

    @property
    def mlp_parameters(self) -> int:
        """Per layer: all experts and their router, of a mixture."""
        if experts := self.experts:
            return self.hidden_size * (3 * (experts.count * experts.size + experts.shared_size) + experts.count)
        return self.hidden_size * self.intermediate_size * (3 if self.gated_mlp else 2)

    @property
    def parameters(self) -> int:
        """All weights, norms included."""
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tied_embeddings else 2)
        norms = self.hidden_size * (2 * self.num_layers + 1)
        return self.num_layers * (self.attention_parameters + self.mlp_parameters) + embeddings + norms

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def to_hf(self) -> dict[str, Any]:
        """The sizes as fields of a Hugging Face config; ``from_hf`` reads them back."""
        return {
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "tie_word_embeddings": self.tied_embeddings,
            **(self.experts.to_hf(self.family) if self.experts else {}),
        }


@cache
def presets() -> dict[str, ModelShape]:
    rows = json.loads(resources.files("ladder_residual").joinpath("assets/presets.json").read_text())
    known = {field.name for field in fields(ModelShape)}
    return {name: ModelShape(**{k: v for k, v in row.items() if k in known}) for name, row in rows.items()}
