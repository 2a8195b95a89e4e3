"""GPTQ: [in / 8, out] of int32, eight rows (columns of the weight) in each; groups in order, or as ``g_idx`` says (act-order)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ..sharding import ShardSpec
from .layout import NIBBLES, SCALES, Layout, Numbers, ShardSpecs, Stored, check_groups, expect, scaled_down, take, unpacked

if TYPE_CHECKING:
    from torch import Tensor

LAST = 15  # the largest number of four bits


class Gptq(Layout):
    main = "qweight"
    parts = ("qweight", "qzeros", "scales", "g_idx")
    scales = ("scales",)

    def shape(self, held: Mapping[str, Stored]) -> tuple[int, int]:
        packed, scales = take(held, "qweight", ("I32",)), take(held, "scales", SCALES)
        if len(packed) != 2:
            raise ValueError(f"qweight has shape {list(packed)}, expected a matrix")
        rows, columns = packed[1], packed[0] * NIBBLES
        size = self.spec.group or columns
        if rows % NIBBLES:
            raise ValueError(f"qweight has {rows} output rows, no multiple of {NIBBLES}")
        if columns % size:
            raise ValueError(f"qweight holds {columns} columns, no whole number of groups of {size}")
        expect("scales", scales, (columns // size, rows))
        expect("qzeros", take(held, "qzeros", ("I32",)), (columns // size, rows // NIBBLES))
        if self.spec.act_order or "g_idx" in held:
            expect("g_idx", take(held, "g_idx", ("I32", "I64")), (columns,))
        return rows, columns

    def shard_specs(self, whole: tuple[int, int], spec: ShardSpec | None) -> ShardSpecs:
        if spec is None:
            return dict.fromkeys(self.parts)
        if spec.dim == 0:
            rows = ShardSpec(1, spec.ranges)
            zeros = scaled_down(spec, NIBBLES, whole[0], 1, f"int32 with {NIBBLES} zero points")
            return {"qweight": rows, "qzeros": zeros, "scales": rows, "g_idx": None}
        packed = scaled_down(spec, NIBBLES, whole[1], 0, f"int32 with {NIBBLES} columns")
        groups = None
        if self.spec.group and not self.spec.act_order:  # else its columns may lie in any group: all scales stay
            groups = scaled_down(spec, self.spec.group, whole[1], 0, f"groups of {self.spec.group}")
        return {"qweight": packed, "qzeros": groups, "scales": groups, "g_idx": ShardSpec(0, spec.ranges)}

    def check(self, parts: Mapping[str, Tensor], whole: tuple[int, int]) -> None:
        columns, groups = parts["qweight"].shape[0] * NIBBLES, parts["scales"].shape[0]
        if self.spec.zeros_minus_one and int(unpacked(parts["qzeros"]).max()) == LAST:
            raise ValueError(
                f"qzeros holds the zero point {LAST}, which stands for 16 or for 0, as whoever reads it likes: quantise again "
                f"with checkpoint_format gptq_v2, which has zero points 0 to {LAST}"
            )
        order = parts.get("g_idx")
        if self.spec.act_order:
            check_groups(parts["g_idx"], groups)
        elif order is not None:
            _check_in_order(order, columns // groups, first=0 if columns == whole[1] else int(order[0]))

    def numbers(self, parts: Mapping[str, Tensor]) -> Numbers:
        zeros = unpacked(parts["qzeros"]).t() + int(self.spec.zeros_minus_one)
        order = parts["g_idx"] if self.spec.act_order else None
        return Numbers(unpacked(parts["qweight"].t()), parts["scales"].t(), zeros, order)


def _check_in_order(g_idx: Tensor, size: int, first: int) -> None:
    import torch

    expected = torch.arange(len(g_idx), device=g_idx.device) // size
    if not torch.equal(g_idx.long() - first, expected):
        raise ValueError(
            "g_idx does not count groups in order, but quantization_config says desc_act: false; one of them is wrong"
        )
