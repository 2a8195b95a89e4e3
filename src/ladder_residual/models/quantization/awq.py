"""AWQ (gemm): [in, out / 8] of int32, eight output rows in each, interleaved for its kernel."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ..sharding import ShardSpec
from .layout import NIBBLES, SCALES, Layout, Numbers, ShardSpecs, Stored, expect, scaled_down, take, unpacked

if TYPE_CHECKING:
    from torch import Tensor

PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # where in its int32 each of eight neighbouring rows lies


class Awq(Layout):
    main = "qweight"
    parts = ("qweight", "qzeros", "scales")
    scales = ("scales",)

    def shape(self, held: Mapping[str, Stored]) -> tuple[int, int]:
        packed, scales = take(held, "qweight", ("I32",)), take(held, "scales", SCALES)
        if len(packed) != 2:
            raise ValueError(f"qweight has shape {list(packed)}, expected a matrix")
        rows, columns = packed[1] * NIBBLES, packed[0]
        size = self.spec.group or columns
        if columns % size:
            raise ValueError(f"qweight holds {columns} columns, no whole number of groups of {size}")
        expect("scales", scales, (columns // size, rows))
        expect("qzeros", take(held, "qzeros", ("I32",)), (columns // size, rows // NIBBLES))
        return rows, columns

    def shard_specs(self, whole: tuple[int, int], spec: ShardSpec | None) -> ShardSpecs:
        if spec is None:
            return dict.fromkeys(self.parts)
        if spec.dim == 0:
            packed = scaled_down(spec, NIBBLES, whole[0], 1, f"int32 with {NIBBLES} rows")
            return {"qweight": packed, "qzeros": packed, "scales": ShardSpec(1, spec.ranges)}
        groups = scaled_down(spec, self.spec.group, whole[1], 0, f"groups of {self.spec.group}") if self.spec.group else None
        return {"qweight": ShardSpec(0, spec.ranges), "qzeros": groups, "scales": groups}

    def numbers(self, parts: Mapping[str, Tensor]) -> Numbers:
        numbers, zeros = (_in_order(parts[name]).t() for name in ("qweight", "qzeros"))
        return Numbers(numbers.contiguous(), parts["scales"].t(), zeros, None)


def _in_order(words: Tensor) -> Tensor:
    return unpacked(words).unflatten(-1, (-1, NIBBLES))[..., list(PLACES)].flatten(-2)
