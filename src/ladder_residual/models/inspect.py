"""What a checkpoint is: family, wiring, size, and what each rank would hold."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from .checkpoint import Checkpoint, resolve
from .families import family_of
from .hf_config import wiring_of
from .loading import built_from, model_config, stored_dtype
from .presets import ModelShape
from .sharding import check_divides, cut_of

RANKS = range(1, 9)


def inspect_checkpoint(source: str | Path) -> dict[str, Any]:
    """Counts are exact: the family's model is built without memory and every parameter cut as a rank would cut it."""
    checkpoint = Checkpoint(resolve(source))
    family = family_of(checkpoint.config)
    config = model_config(checkpoint, family, None)
    shape = ModelShape.from_hf(config.to_dict())
    wiring = wiring_of(config)
    dtype = stored_dtype(config, checkpoint)
    with built_from(checkpoint.directory / "config.json"), torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    ranks: dict[int, Any] = {}
    for tp in RANKS:
        try:
            check_divides(shape, family, tp)
            wiring.check_tp(tp)
        except ValueError as error:
            ranks[tp] = {"refused": str(error)}
            continue
        elements = 0
        for name, whole in shapes.items():
            cut = cut_of(name, whole, shape, tp, 0)
            elements += prod(cut.local_shape(whole) if cut else whole)
        kv_heads = max(1, shape.num_kv_heads // tp)
        ranks[tp] = {
            "weight_bytes": elements * dtype.itemsize,
            "kv_bytes_per_token": 2 * shape.num_layers * kv_heads * shape.head_dim * dtype.itemsize,
        }
    return {
        "family": family.model_type,
        "wiring": wiring.spec,
        "picture": wiring.picture(),
        "layers": shape.num_layers,
        "parameters": sum(prod(s) for s in shapes.values()),
        "dtype": str(dtype).removeprefix("torch."),
        "shape": shape.to_dict(),
        "ranks": ranks,
    }
