"""The tensors that make up one quantised weight: their names, their shapes, the part of each that a rank keeps, their sum.

A ``Layout`` knows one format. A weight is [out, in] whatever its tensors look like, and the shards of them are again a
quantised weight of that format: scales, zero points, packed columns and ``g_idx`` travel with it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from ..sharding import ShardSpec
from .spec import QuantSpec

if TYPE_CHECKING:
    from torch import Tensor

PLAIN = ("F64", "F32", "F16", "BF16")
SCALES = ("F32", "F16", "BF16")
NIBBLES = 8  # int4 numbers in an int32
ShardSpecs = dict[str, ShardSpec | None]  # of each tensor; None: a rank reads all of it


class Stored(NamedTuple):
    """A tensor as a file's header has it."""

    shape: tuple[int, ...]
    dtype: str


class Numbers(NamedTuple):
    """A weight, unpacked."""

    values: Tensor  # [out, in]: E4M3, or uint8 of 0 to 15
    scales: Tensor  # [out, groups of columns]
    zeros: Tensor | None  # [out, groups]; None: there are none to subtract
    order: Tensor | None  # the group of each column, where they are not in order


class Layout(ABC):
    """How one format stores a weight. Names are those behind the module's: ``weight_scale`` of ``...down_proj.weight_scale``."""

    main: str  # the tensor that holds the numbers: a module is quantised if it has this one
    parts: tuple[str, ...]  # every tensor that may belong to it, in the order they are named in messages
    scales: tuple[str, ...]  # of those, the floats: they must be finite

    def __init__(self, spec: QuantSpec) -> None:
        self.spec = spec

    def is_quantised(self, held: Mapping[str, Stored]) -> bool:
        return self.main in held

    @abstractmethod
    def shape(self, held: Mapping[str, Stored]) -> tuple[int, int]:
        """[out, in] of the weight. ValueError unless the tensors fit each other."""

    @abstractmethod
    def shard_specs(self, whole: tuple[int, int], spec: ShardSpec | None) -> ShardSpecs:
        """What a rank reads of each tensor to hold ``spec`` of the weight. ValueError if that is no whole number of groups."""

    def check(self, parts: Mapping[str, Tensor], whole: tuple[int, int]) -> None:  # noqa: B027 - most have nothing to add
        """ValueError if what the tensors hold is no weight of this format, though their shapes are in order."""

    @abstractmethod
    def numbers(self, parts: Mapping[str, Tensor]) -> Numbers:
        """Of all the parts or of what ``shard_specs`` keeps of them, once ``check`` let them pass. Nothing waits for a GPU."""

    def dequantise(self, parts: Mapping[str, Tensor]) -> Tensor:
        """In float32."""
        values, scales, zeros, order = self.numbers(parts)
        return grouped(values, zeros, scales, order)


def take(held: Mapping[str, Stored], name: str, dtypes: tuple[str, ...]) -> tuple[int, ...]:
    """The shape of a tensor that must be there, as one of ``dtypes``."""
    if name not in held:
        raise ValueError(f"has no {name}, which its format needs (it has {', '.join(sorted(held))})")
    if held[name].dtype not in dtypes:
        raise ValueError(f"{name} is stored as {held[name].dtype}, supported: {', '.join(dtypes)}")
    if 0 in held[name].shape:
        raise ValueError(f"{name} is empty: it has shape {list(held[name].shape)}")
    return held[name].shape


def expect(name: str, found: tuple[int, ...], *shapes: tuple[int, ...]) -> None:
    if found not in shapes:
        wanted = " or ".join(str(list(shape)) for shape in shapes)
        raise ValueError(f"{name} has shape {list(found)}, expected {wanted}")


def scaled_down(spec: ShardSpec, by: int, total: int, dim: int, what: str) -> ShardSpec:
    """``spec`` counted in units of ``by``. ValueError unless its ranges begin and end between two units (or at the end)."""
    for start, stop in spec.ranges:
        if start % by or (stop % by and stop != total):
            side = "rows" if spec.dim == 0 else "columns"
            raise ValueError(
                f"{side} {start} to {stop} of {total} are no whole number of {what}: use fewer ranks (--tp), so that each gets "
                f"a multiple of {by} {side}"
            )
    return ShardSpec(dim, tuple((start // by, -(-stop // by)) for start, stop in spec.ranges))


def unpacked(words: Tensor) -> Tensor:
    """int32 [rows, columns / 8] -> uint8 [rows, columns]: eight numbers to a word, the first in its lowest bits."""
    import torch

    # Flat, because a dim of one word may have any stride. Little-endian, as safetensors is.
    pairs = words.contiguous().flatten().view(torch.uint8)
    return torch.stack((pairs & 15, pairs >> 4), dim=-1).view(words.shape[0], -1)


def grouped(numbers: Tensor, zeros: Tensor | None, scales: Tensor, group_of_column: Tensor | None) -> Tensor:
    """``(numbers - zeros) * scales`` [out, in] in float32; zeros and scales are [out, groups], all of one size unless
    ``group_of_column`` says otherwise."""
    import torch

    weight = numbers.to(torch.float32)
    scales = scales.to(torch.float32)
    if group_of_column is not None:
        places = group_of_column.long()
        if zeros is not None:
            weight.sub_(zeros.to(torch.float32)[:, places])
        return weight.mul_(scales[:, places])
    by_group = weight.view(weight.shape[0], scales.shape[1], -1)
    if zeros is not None:
        by_group.sub_(zeros.to(torch.float32).unsqueeze(-1))
    by_group.mul_(scales.unsqueeze(-1))
    return weight


def check_groups(g_idx: Tensor, groups: int) -> None:
    low, high = int(g_idx.min()), int(g_idx.max())
    if low < 0 or high >= groups:
        raise ValueError(f"g_idx names groups {low} to {high}, but there are scales of {groups} (0 to {groups - 1})")
