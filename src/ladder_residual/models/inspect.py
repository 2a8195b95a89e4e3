"""What a checkpoint is: family, wiring, size, and what each rank would hold. From ``config.json`` and the headers: no torch."""

from __future__ import annotations

import re
from math import prod
from pathlib import Path
from typing import Any

from .preflight import BYTES, CheckedSource, check_source
from .presets import ModelShape
from .sharding import check_divides

RANKS = range(1, 9)
_LAYER = re.compile(r"(.*layers\.)([0-9]+)\.(.*)")


def inspect_checkpoint(source: str | Path) -> dict[str, Any]:
    """Counts are exact: every stored tensor is sharded as a rank would shard it."""
    found = check_source(source)
    shape, wiring, family = found.shape or _shape_by_transformers(found), found.wiring, found.family
    shapes = _parameters(found, shape)
    ranks: dict[int, Any] = {}
    for tp in RANKS:
        try:
            check_divides(shape, family, tp)
            wiring.check_tp(tp)
            stored, loaded = found.rank_bytes(shape, tp, 0, BYTES[found.dtype])
        except ValueError as error:
            ranks[tp] = {"refused": str(error)}
            continue
        kv_heads = max(1, shape.num_kv_heads // tp)
        ranks[tp] = {
            "weight_bytes": loaded,
            "stored_bytes": stored,
            "kv_bytes_per_token": 2 * shape.num_layers * kv_heads * shape.head_dim * BYTES[found.dtype],
        }
    return {
        "family": family.model_type,
        "wiring": wiring.spec,
        "picture": wiring.picture(),
        "layers": shape.num_layers,
        "parameters": sum(map(prod, shapes.values())),
        "dtype": found.dtype,
        "adapter": {"rank": found.adapter.rank, "base": str(found.checkpoint.directory)} if found.adapter else None,
        "quantization": found.quantization.to_dict() if found.quantization else None,
        "shape": shape.to_dict(),
        "ranks": ranks,
    }


def _shape_by_transformers(found: CheckedSource) -> ModelShape:
    from .loading import model_config

    return ModelShape.from_hf(model_config(found).to_dict())


def _parameters(found: CheckedSource, shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Stored tensors and their shapes. ValueError unless the embedding is the config's and layers of a kind are alike; whether each
    tensor is what the family's model needs is checked where that model is built (``parameters.py``)."""
    checkpoint = found.checkpoint
    if shape.tied_embeddings:
        checkpoint.check_tied_head()
    shapes = found.stored_weights(shape)
    tops = [
        found_shape for name, found_shape in shapes.items() if name.rpartition(".")[0].endswith(("embed_tokens", "embed_in"))
    ]
    if tops != [(shape.vocab_size, shape.hidden_size)]:
        raise ValueError(
            f"{checkpoint.directory}/config.json calls for an embedding of {[shape.vocab_size, shape.hidden_size]}, the safetensors "
            f"hold {[list(top) for top in tops]}: one of them is wrong"
        )
    layers: dict[int, dict[str, tuple[int, ...]]] = {}
    for name, whole in shapes.items():
        if match := _LAYER.fullmatch(name):
            layers.setdefault(int(match[2]), {})[match[3]] = whole
    kinds: dict[tuple[str, bool], dict[str, tuple[int, ...]]] = {}
    for index, held in sorted(layers.items()):
        kind = found.wiring.kind_of(index), any("experts" in name for name in held)
        expected = kinds.setdefault(kind, held)
        if differs := sorted(dict(held.items() ^ expected.items())):
            raise ValueError(
                f"{checkpoint.directory}: {differs[0]} of layer {index} differs in the safetensors from other layers' "
                f"({held.get(differs[0])}, {expected.get(differs[0])}): download the checkpoint again"
            )
    return shapes
