"""Which chunks of the whole model a rank holds.

A parameter is sharded twice: by tensor parallelism into one or more ranges of a dim (``sharding.ShardSpec``), then by FSDP into rows
of what is left. Checkpoints, gradient norms and exports all ask the same question: which chunk of the whole is this?
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from .sharding import ShardSpec


@dataclass(frozen=True)
class Chunk:
    """A block of a whole parameter that is also a block of the local shard."""

    whole: tuple[int, ...]  # where it begins in the whole parameter
    local: tuple[int, ...]  # where it begins in the shard
    size: tuple[int, ...]
    copies: int = 1  # tensor-parallel ranks that hold it alike

    def of(self, shard: Tensor) -> Tensor:
        for dim, (start, length) in enumerate(zip(self.local, self.size, strict=True)):
            shard = shard.narrow(dim, start, length)
        return shard


def local_of(tensor: Any) -> Tensor:
    """The part of a tensor that lies here; shares its memory."""
    held: Any = tensor.detach()
    return held.to_local() if isinstance(held, DTensor) else held


def local_part(whole: Tensor, spec: ShardSpec | None) -> Tensor:
    """What ``spec`` keeps of ``whole``; None keeps all of it."""
    if spec is None:
        return whole
    return torch.cat([whole.narrow(spec.dim, start, stop - start) for start, stop in spec.ranges], spec.dim)


def chunks_of(parameter: Any, spec: ShardSpec | None, tp: int) -> list[Chunk]:
    """The chunks of this rank's shard of ``parameter`` (a DTensor of FSDP, or a plain tensor), sharded over ``tp`` ranks."""
    rows, size = _local_rows(parameter)
    return local_chunks(rows, tuple(size), spec, tp)


def local_chunks(rows: int, size: tuple[int, ...], spec: ShardSpec | None, tp: int) -> list[Chunk]:
    """Of a shard of ``size`` that begins at row ``rows`` of what ``spec`` keeps of the whole."""
    if 0 in size:
        return []
    if spec is None:
        return [Chunk((rows, *[0] * (len(size) - 1)), (0,) * len(size), size, tp)]
    chunks, offset = [], 0
    for (start, stop), copies in zip(spec.ranges, spec.copies, strict=True):
        # This range is [offset, offset + length) of the rank's slice; with FSDP only rows [rows, rows + size[0]) of that are here.
        low, high = offset, offset + stop - start
        offset = high
        if spec.dim == 0:
            low, high = max(low, rows), min(high, rows + size[0])
            if low >= high:
                continue
        whole, local, block = [rows, *[0] * (len(size) - 1)], [0] * len(size), list(size)
        whole[spec.dim] = start + low - (offset - (stop - start))
        local[spec.dim] = low - (rows if spec.dim == 0 else 0)
        block[spec.dim] = high - low
        chunks.append(Chunk(tuple(whole), tuple(local), tuple(block), copies))
    return chunks


def _local_rows(parameter: Any) -> tuple[int, torch.Size]:
    """First row and size of what lies here of a rank's slice."""
    if not isinstance(parameter, DTensor):
        return 0, parameter.shape
    size, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return (offset[0] if offset else 0), torch.Size(size)
