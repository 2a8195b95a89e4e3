"""Causal attention over whole rows, without a mask.

Given no mask, transformers looks at the positions' values to find out whether sequences were packed into a row. That makes the CPU
wait for the GPU in every forward pass, and cannot be recorded in a CUDA graph. Our rows need no mask at all: documents in a row
see each other, and padding stands at the end, where nothing that counts can see it. An attention function that transformers has no
mask for gets none.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import functional as F
from transformers.modeling_utils import AttentionInterface

NAME = "ladder_causal_rows"


def causal_rows(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **_: Any,
) -> tuple[Tensor, None]:
    grouped = query.shape[1] != key.shape[1]
    out = F.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scaling, dropout_p=dropout, enable_gqa=grouped
    )
    return out.transpose(1, 2).contiguous(), None


def attention_for(config: dict[str, Any], sequence: int) -> str | None:
    """Its name where a model attends to the whole row and does nothing else; None leaves transformers' own."""
    window = config.get("sliding_window")
    limited = window is not None and window < sequence
    if limited or config.get("attn_logit_softcapping") or config.get("attention_chunk_size"):
        return None
    AttentionInterface.register(NAME, causal_rows)
    return NAME
