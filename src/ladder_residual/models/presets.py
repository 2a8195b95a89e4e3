"""Published model shapes by name, for planning and benchmarks. One table, in ``assets/presets.json``; no torch.

A shape is what speed depends on: sizes, not weights. Any Hugging Face ``config.json`` of a dense decoder gives one too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import cache
from importlib import resources
from typing import Any

from ..common.suggest import did_you_mean


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

    def __post_init__(self) -> None:
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
        )

    @property
    def attention_parameters(self) -> int:
        """Per layer: query, key, value and output projections."""
        return self.hidden_size * self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)

    @property
    def mlp_parameters(self) -> int:
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
        }


@cache
def presets() -> dict[str, ModelShape]:
    rows = json.loads(resources.files("ladder_residual").joinpath("assets/presets.json").read_text())
    known = {field.name for field in fields(ModelShape)}
    return {name: ModelShape(**{k: v for k, v in row.items() if k in known}) for name, row in rows.items()}
