"""Models with random weights, to measure speed: a published shape costs the same whatever its weights are."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from ..common.memory import require
from ..core.reduce import Reducer
from ..distributed.world import Rank
from .families import FAMILIES
from .hf import ladder_classes
from .loading import DTYPES, load_model, place_parameters, restore_buffers, set_reducers
from .preflight import check_model
from .presets import ModelShape
from .sharding import ShardSpec, check_divides


def random_model(
    shape: ModelShape,
    rank: Rank,
    dtype: torch.dtype = torch.float32,
    *,
    uneven: bool = False,
    reducer: Reducer | None = None,
) -> PreTrainedModel:
    """This rank's shard of a Llama of ``shape``."""
    family = FAMILIES["llama"]
    config_class, _ = ladder_classes("llama")
    shape.require_dense("a model with random weights")
    check_divides(shape, family, rank.size, uneven)
    config = config_class(**shape.to_hf(), max_position_embeddings=131072)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    need = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters()) / rank.size
    require(
        need, rank.device, f"a rank of {shape.num_layers} random layers", "use a smaller --model, fewer --layers or more ranks"
    )
    restore_buffers(model, rank.device)
    generator = torch.Generator(rank.device).manual_seed(rank.rank)

    def draw(name: str, whole: tuple[int, ...], shard: ShardSpec | None) -> torch.Tensor:
        local = shard.local_shape(whole) if shard else whole
        if len(local) == 1:
            return torch.ones(local, dtype=dtype, device=rank.device)
        return torch.empty(local, dtype=dtype, device=rank.device).normal_(0, 0.02, generator=generator)

    place_parameters(model, draw, shape, family, rank)
    set_reducers(model, reducer or rank.reducer())
    return model.eval()


def load_or_random_model(
    source: str, rank: Rank, *, layers: int | None = None, dtype: str = "float32", uneven: bool = False
) -> PreTrainedModel:
    """This rank's shard of a checkpoint directory, or of a published shape with random weights and perhaps fewer layers."""
    check_model(source, layers=layers)
    if Path(source).is_dir():
        return load_model(source, rank, dtype=dtype, uneven=uneven)
    if dtype not in DTYPES:
        raise ValueError(f"random weights have no dtype of their own: got {dtype!r}, choose {', '.join(DTYPES)}")
    shape = ModelShape.from_name(source)
    return random_model(replace(shape, num_layers=layers) if layers else shape, rank, DTYPES[dtype], uneven=uneven)
