"""Weights and optimizer state of a student under FSDP2: on disk as tensors (``train/dcp_checkpoint.py``), or whole on rank 0.

``Trainer(fsdp=...)`` shards on GPUs only (on CPU it silently is DDP), so ``train/parallelize.py`` shards, the same way everywhere, and
the Trainer's own saving of shards is not used.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_state_dict, set_state_dict

from ..train.dcp_checkpoint import load_tensors, save_tensors

FOLDER = "sharded_state"


def whole_weights(model: nn.Module) -> dict[str, Any]:
    """All weights on rank 0's CPU; every rank must call it."""
    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))


def save_sharded(model: nn.Module, optimizer: Any, folder: Path) -> None:
    weights, state = get_state_dict(model, _unwrapped(optimizer))
    save_tensors(_tensors(weights, state), folder / FOLDER, dist.group.WORLD)


def load_sharded(model: nn.Module, optimizer: Any, folder: Path) -> None:
    """Hyper-parameters are the optimizer's own: the settings and the scheduler make them."""
    weights, state = get_state_dict(model, _unwrapped(optimizer))
    load_tensors(_tensors(weights, state), folder / FOLDER, dist.group.WORLD)
    set_state_dict(model, _unwrapped(optimizer), model_state_dict=weights, optim_state_dict=state)


def _tensors(weights: dict[str, Any], state: dict[str, Any]) -> dict[str, Tensor]:
    moments = {f"optimizer.{name}.{key}": value for name, values in state["state"].items() for key, value in values.items()}
    return {f"model.{name}": tensor for name, tensor in weights.items()} | moments


def _unwrapped(optimizer: Any) -> torch.optim.Optimizer:
    return getattr(optimizer, "optimizer", optimizer)  # accelerate wraps it
