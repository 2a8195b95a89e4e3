"""A rank's shard as torch's distributed checkpoint should see it: blocks of a whole tensor.

With that, a checkpoint knows nothing of the layout that wrote it: every number lies at its place in the whole model, and any other
number of ranks, dp x tp, or a single process (export) reads what it needs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from ..pieces import Piece, local_of, pieces_of
from .building import NextToken
from .optimizer import ShardedAdamW


class InWhole(Tensor):
    """A local tensor with its places in a whole one. Torch's checkpoint planners ask objects by these three methods (as of DTensor)."""

    local: Tensor
    pieces: list[Piece]
    whole: torch.Size
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def of(cls, local: Tensor, pieces: list[Piece], whole: tuple[int, ...]) -> InWhole:
        tensor = local.as_subclass(cls)
        tensor.local, tensor.pieces, tensor.whole = local, pieces, torch.Size(whole)
        return tensor

    def size(self, dim: Any = None) -> Any:  # the planners compare it with what is stored
        return self.whole if dim is None else self.whole[dim]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(piece.whole), torch.Size(piece.size)) for piece in self.pieces]

    def __create_write_items__(self, name: str, _: Any) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self.local)
        return [
            WriteItem(
                index=MetadataIndex(name, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.whole),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        piece = next(piece for piece in self.pieces if torch.Size(piece.whole) == index.offset)
        return piece.of(self.local)


def training_state(trained: NextToken, optimizer: ShardedAdamW, *, copy: bool) -> dict[str, Tensor]:
    """Weights and moments by name. ``copy``: on the CPU, so that training may go on while they are written."""
    model: Any = trained.model
    cuts, shapes, tp = model.tensor_parallel_cuts, model.whole_shapes, optimizer.layout.tp
    parts = {"model": optimizer.shards, **optimizer.state()}
    state: dict[str, Tensor] = {}
    for name, parameter in optimizer.parameters.items():
        pieces = pieces_of(parameter, cuts[name], tp)
        for part, tensors in parts.items():
            local = local_of(tensors[name])
            state[f"{part}.{name}"] = InWhole.of(local.to("cpu", copy=True) if copy else local, pieces, shapes[name])
    return state


def random_state(device: torch.device) -> Tensor:
    """Of every generator of this process, as bytes of fixed size."""
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device).cpu())
    return torch.cat(states)


def set_random_state(state: Tensor, device: torch.device) -> None:
    size = len(torch.get_rng_state())
    torch.set_rng_state(state[:size].clone())
    if device.type == "cuda" and len(state) > size:
        torch.cuda.set_rng_state(state[size:].clone(), device)
