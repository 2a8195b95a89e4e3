"""Which engine computes: the CUDA engine where it can, otherwise the model itself."""

from __future__ import annotations

import warnings
from typing import Any

from transformers import PreTrainedModel

from ..distributed.world import Rank
from ..links.link import Link
from .request import check_engine


def with_engine(
    model: PreTrainedModel,
    rank: Rank,
    kind: str,
    *,
    batch: int,
    context: int,
    beams: int,
    schedule: str,
    reducer: str = "auto",
    kv_cache_dtype: str = "auto",
    link: Link | None = None,
) -> Any:
    """``model`` itself, or the CUDA engine holding its weights. ``auto`` falls back to the model with one warning, unless the
    other ranks are emulated (``link``): only the engine does that."""
    check_engine(kind, schedule, reducer, kv_cache_dtype, emulated=link is not None, device=rank.device.type)
    if link is not None:
        kind = "cuda"
    if kind == "torch" or (kind == "auto" and rank.device.type != "cuda"):
        return model
    from .engine_adapter import engine_model

    try:
        if beams > 1:
            raise ValueError("the CUDA engine's cache cannot follow beams; use --num-beams 1")
        limit = getattr(model.config, "max_position_embeddings", context)
        asked: dict[str, Any] = {"batch": batch, "max_context": min(context, limit), "kv_cache_dtype": kv_cache_dtype}
        return engine_model(model, rank, **asked, schedule=schedule, reducer=reducer, link=link, exact=kind == "cuda")
    except ValueError as error:
        if kind == "cuda" or kv_cache_dtype != "auto":  # the model's own cache would be twice as large
            raise
        warnings.warn(f"using the slow path: {error}", stacklevel=2)
        return model
