"""Where the numbers a rank holds stand in the whole model.

A rank's share of a parameter is cut twice: by tensor parallelism into one or more ranges of a dim (``sharding.Cut``), then by FSDP
into rows of what is left. Checkpoints, gradient norms and exports all ask the same question: which block of the whole is this?
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from .sharding import Cut


@dataclass(frozen=True)
class Piece:
    """A block of a whole parameter that is a block of the local shard as well."""

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


def pieces_of(parameter: Any, cut: Cut | None, tp: int) -> list[Piece]:
    """The blocks of this rank's shard of ``parameter`` (a DTensor of FSDP, or a plain tensor), cut over ``tp`` ranks."""
    rows, size = _local_rows(parameter)
    return blocks(rows, tuple(size), cut, tp)


def blocks(rows: int, size: tuple[int, ...], cut: Cut | None, tp: int) -> list[Piece]:
    """Of a shard of ``size`` that begins at row ``rows`` of what ``cut`` leaves of the whole."""
    if 0 in size:
        return []
    if cut is None:
        return [Piece((rows, *[0] * (len(size) - 1)), (0,) * len(size), size, tp)]
    pieces, offset = [], 0
    for (start, stop), copies in zip(cut.ranges, cut.copies, strict=True):
        # This range is [offset, offset + length) of the rank's slice; with FSDP only rows [rows, rows + size[0]) of that are here.
        low, high = offset, offset + stop - start
        offset = high
        if cut.dim == 0:
            low, high = max(low, rows), min(high, rows + size[0])
            if low >= high:
                continue
        whole, local, block = [rows, *[0] * (len(size) - 1)], [0] * len(size), list(size)
        whole[cut.dim] = start + low - (offset - (stop - start))
        local[cut.dim] = low - (rows if cut.dim == 0 else 0)
        block[cut.dim] = high - low
        pieces.append(Piece(tuple(whole), tuple(local), tuple(block), copies))
    return pieces


def _local_rows(parameter: Any) -> tuple[int, torch.Size]:
    """First row and size of what lies here of a rank's slice."""
    if not isinstance(parameter, DTensor):
        return 0, parameter.shape
    size, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return (offset[0] if offset else 0), torch.Size(size)
