"""FSDP2 for student and teacher, and their state on disk.

``Trainer(fsdp=...)`` shards on GPUs only (on CPU it silently is DDP), so we shard ourselves, the same way everywhere: each
decoder layer, then the rest of the model. Weights and gradients travel in the precision of the compute, the optimizer works on
float32.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import PreTrainedModel

from ..model import decoder_layers
from ..parallel import World

STATE = "sharded_state"


def shard(model: PreTrainedModel, world: World, compute: torch.dtype | None) -> PreTrainedModel:
    """``fully_shard`` each layer, then the model, over all ranks. ``compute`` is the precision of forward and backward."""
    mesh = init_device_mesh(world.device.type, (world.size,))
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for layer in decoder_layers(model):
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    # The rest (embedding, head, last norm) stays whole after its forward: the loss reads the teacher's head in the student's call.
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    return model


def whole_weights(model: nn.Module) -> dict[str, Any]:
    """All weights on rank 0's CPU; every rank must call it."""
    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))


def save_sharded(model: nn.Module, optimizer: Any, folder: Path) -> None:
    weights, state = get_state_dict(model, _plain(optimizer))
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder / STATE)


def load_sharded(model: nn.Module, optimizer: Any, folder: Path) -> None:
    weights, state = get_state_dict(model, _plain(optimizer))
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=folder / STATE)
    set_state_dict(model, _plain(optimizer), model_state_dict=weights, optim_state_dict=state)


def _plain(optimizer: Any) -> torch.optim.Optimizer:
    return getattr(optimizer, "optimizer", optimizer)  # accelerate wraps it
