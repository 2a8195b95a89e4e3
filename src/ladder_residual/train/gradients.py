"""Complete the gradients of what several tensor-parallel ranks hold alike."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..distributed.world import World
from ..models.chunks import chunks_of, local_of
from ..models.sharding import ShardSpec


def finish_gradients(model: nn.Module, world: World) -> None:
    """Call once after the last backward, before clipping and step.

    Each rank's backward yields its own share of those gradients (``reduce.py``); they are summed in one message per dtype.
    """
    if world.size == 1:
        return
    specs: dict[str, ShardSpec | None] = model.shard_specs  # type: ignore[assignment]
    by_dtype: dict[torch.dtype, list[tuple[Tensor, int]]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        gradient = local_of(parameter.grad)  # with FSDP: this rank's rows of it, which are the same rows on all these ranks
        chunks = chunks_of(parameter, specs[name], world.size)
        alike = [(chunk.of(gradient), chunk.copies) for chunk in chunks if chunk.copies > 1]
        by_dtype.setdefault(parameter.dtype, []).extend(alike)
    for dtype, shared in by_dtype.items():
        # What only some ranks hold alike (replicated KV heads) gets a slot per group of those ranks.
        sizes = [part.numel() * (world.size // copies) for part, copies in shared]
        flat = torch.zeros(sum(sizes), dtype=dtype, device=world.device)
        slots = [
            chunk[(world.rank // copies) * part.numel() :][: part.numel()].view(part.shape)
            for chunk, (part, copies) in zip(flat.split(sizes), shared, strict=True)
        ]
        for slot, (part, _) in zip(slots, shared, strict=True):
            slot.copy_(part)
        world.drain()
        dist.all_reduce(flat, group=world.group)
        for slot, (part, _) in zip(slots, shared, strict=True):
            part.copy_(slot)
