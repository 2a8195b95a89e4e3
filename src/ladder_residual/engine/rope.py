"""Cosine and sine tables of the rotary embedding, float32, for every position the engine may reach."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .spec import EngineSpec


def inverse_frequencies(spec: EngineSpec) -> Tensor:
    """(head_dim / 2) angles per position, for default, linear and Llama-3 rope. transformers' own functions need a config object and have
    no default; ``tests/engine/test_rope.py`` holds these against them."""
    dim = spec.shape.head_dim
    inv = spec.rope_theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    kind = spec.rope_scaling.get("rope_type", "default")
    if kind == "linear":
        inv = inv / spec.rope_scaling["factor"]
    elif kind == "llama3":
        # low frequencies are divided by `factor`, high ones kept, those between interpolated
        factor = spec.rope_scaling["factor"]
        low, high = spec.rope_scaling["low_freq_factor"], spec.rope_scaling["high_freq_factor"]
        turns = spec.rope_scaling["original_max_position_embeddings"] * inv / (2 * math.pi)
        kept = ((turns - low) / (high - low)).clamp(0, 1)
        inv = kept * inv + (1 - kept) * inv / factor
    return inv.float()


def rope_tables(spec: EngineSpec, max_context: int, device: torch.device | str) -> tuple[Tensor, Tensor]:
    """(max_context, head_dim) each; the second half of the columns repeats the first, as Hugging Face lays heads out."""
    angles = torch.outer(torch.arange(max_context, dtype=torch.float32), inverse_frequencies(spec))
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos().to(device), angles.sin().to(device)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Plain PyTorch rotation of (..., head_dim)."""
    half = x.shape[-1] // 2
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], dim=-1) * sin
