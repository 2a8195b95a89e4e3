"""The Hugging Face decoders we can rewire: one row each. No torch.

A row names the parts of the family's decoder layer. Adding a family is adding a row and its parity test; how its weights
shard follows from the names of its projections (``sharding.py``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..common.suggest import did_you_mean
from ..core.config import ADDS_PARTIALS, Wiring

PREFIX = "ladder_"  # model_type of a rewired checkpoint: software that does not know the wiring must not load it


@dataclass(frozen=True, kw_only=True)
class Family:
    model_type: str
    attention: str = "self_attn"
    mlp: str = "mlp"
    attention_norm: str | None = "input_layernorm"
    mlp_norm: str | None = "post_attention_layernorm"
    # Applied to a module's output before it joins the stream. A norm there is a post-norm and must see the all-reduced output.
    attention_after: str | None = None
    mlp_after: str | None = None
    post_norm: bool = False
    multiplier: str | None = None  # attribute of the layer that scales every residual branch
    refuse_tp: str | None = None  # why this family cannot be sharded

    @property
    def ladder_type(self) -> str:
        return PREFIX + self.model_type


def _llama_like(*names: str) -> list[Family]:
    return [Family(model_type=name) for name in names]


_WIDE_QK_NORM = "its query/key norm spans all heads, so no rank can compute it from its own heads"

FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in [
        *_llama_like("llama", "mistral", "qwen2", "qwen3", "gemma", "olmo", "smollm3", "starcoder2"),
        *_llama_like("mixtral", "qwen2_moe", "qwen3_moe"),
        Family(model_type="phi3", attention_after="resid_attn_dropout", mlp_after="resid_mlp_dropout"),
        Family(model_type="granite", multiplier="residual_multiplier"),
        Family(
            model_type="gpt_neox",
            attention="attention",
            attention_after="post_attention_dropout",
            mlp_after="post_mlp_dropout",
        ),
        *(
            Family(
                model_type=name,
                mlp_norm="pre_feedforward_layernorm",
                attention_after="post_attention_layernorm",
                mlp_after="post_feedforward_layernorm",
                post_norm=True,
            )
            for name in ("gemma2", "gemma3_text")
        ),
        *(
            Family(
                model_type=name,
                attention_norm=None,
                mlp_norm=None,
                attention_after="post_attention_layernorm",
                mlp_after="post_feedforward_layernorm",
                post_norm=True,
                refuse_tp=_WIDE_QK_NORM,
            )
            for name in ("olmo2", "olmo3")
        ),
    ]
}

_SAME_INPUT = (
    "attention and MLP of a layer read the same input already (one all-reduce per layer), so there is no chain to ladder"
)
REFUSED: dict[str, str] = {
    **dict.fromkeys(("phi", "cohere", "cohere2", "falcon", "gptj", "codegen", "gpt_neox_japanese"), _SAME_INPUT),
    "gpt2": "its layers carry biases and position embeddings of a pre-RoPE design that no row here describes yet",
    "gemma3": "it is the multimodal model; convert its language model (model_type gemma3_text)",
}


def family_of(config: Mapping[str, Any]) -> Family:
    """The row of a ``config.json`` (plain or rewired); ValueError with the reason if it cannot be rewired."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise ValueError(f"config.json has no usable model_type (got {model_type!r:.80}); is this a Hugging Face checkpoint?")
    base = model_type.removeprefix(PREFIX)
    if base in REFUSED:
        raise ValueError(f"model_type {base!r} cannot be rewired: {REFUSED[base]}")
    if base not in FAMILIES:
        if config.get("auto_map") and base == model_type:
            raise ValueError(
                f"model_type {base!r:.80} comes with Python code of its own (auto_map), which is never run here; "
                f"supported: {', '.join(sorted(FAMILIES))}"
            )
        hint = did_you_mean(base, FAMILIES)
        raise ValueError(f"unknown family: model_type {base!r:.80}{hint}; supported: {', '.join(sorted(FAMILIES))}")
    if base == "gpt_neox" and config.get("use_parallel_residual", True):
        raise ValueError(f"gpt_neox with use_parallel_residual=true (Pythia) cannot be rewired: {_SAME_INPUT}")
    return FAMILIES[base]


def check_wiring(family: Family, wiring: Wiring) -> None:
    """Refuse a wiring whose rule is not defined for the family."""
    if family.post_norm and wiring.kind in ADDS_PARTIALS and wiring.kind != "no-comm":  # which is wrong on purpose
        raise ValueError(
            f"{wiring.name} adds partials to the stream, but {family.model_type} norms a module's output first, and the norm of "
            f"a partial is not a partial of the norm; use ladder or standard"
        )
