"""int4 of compressed-tensors (pack-quantized): eight columns of a row in an int32, numbers stored plus 8."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ..sharding import ShardSpec
from .layout import NIBBLES, SCALES, Layout, Numbers, ShardSpecs, Stored, check_groups, expect, scaled_down, take, unpacked

if TYPE_CHECKING:
    from torch import Tensor

MIDDLE = 8  # what is stored for 0


class PackedInt4(Layout):
    main = "weight_packed"
    parts = ("weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx", "weight_shape")
    scales = ("weight_scale",)

    def shape(self, held: Mapping[str, Stored]) -> tuple[int, int]:
        packed = take(held, "weight_packed", ("I32",))
        scale = take(held, "weight_scale", SCALES)
        expect("weight_shape", take(held, "weight_shape", ("I64", "I32")), (2,))
        if len(packed) != 2 or len(scale) != 2:
            raise ValueError(f"weight_packed and weight_scale have shapes {list(packed)} and {list(scale)}, expected matrices")
        rows, columns = packed[0], packed[1] * NIBBLES
        groups = 1 if self.spec.group is None else columns // self.spec.group
        if self.spec.group and columns % self.spec.group:
            raise ValueError(f"weight_packed holds {columns} columns, no whole number of groups of {self.spec.group}")
        expect("weight_scale", scale, (rows, groups))
        if self.spec.zero_points:
            expect("weight_zero_point", take(held, "weight_zero_point", ("I32",)), (-(-rows // NIBBLES), groups))
        elif "weight_zero_point" in held:
            raise ValueError("has weight_zero_point, but quantization_config says that the weights are symmetric")
        if self.spec.act_order:
            expect("weight_g_idx", take(held, "weight_g_idx", ("I32", "I64")), (columns,))
        elif "weight_g_idx" in held:
            raise ValueError("has weight_g_idx, but quantization_config says nothing of actorder: group")
        return rows, columns

    def shard_specs(self, whole: tuple[int, int], spec: ShardSpec | None) -> ShardSpecs:
        specs: ShardSpecs = {"weight_packed": spec, "weight_scale": None, "weight_shape": None}
        zeros = order = None
        if spec and spec.dim == 0:
            specs["weight_scale"] = spec
            if self.spec.zero_points:
                zeros = scaled_down(spec, NIBBLES, whole[0], 0, f"int32 with {NIBBLES} zero points")
        elif spec:
            specs["weight_packed"] = scaled_down(spec, NIBBLES, whole[1], 1, f"int32 with {NIBBLES} columns")
            if self.spec.act_order:
                order = ShardSpec(0, spec.ranges)  # its columns may lie in any group: all scales stay
            elif self.spec.group:
                specs["weight_scale"] = zeros = scaled_down(spec, self.spec.group, whole[1], 1, f"groups of {self.spec.group}")
        if self.spec.zero_points:
            specs["weight_zero_point"] = zeros
        if self.spec.act_order:
            specs["weight_g_idx"] = order
        return specs

    def check(self, parts: Mapping[str, Tensor], whole: tuple[int, int]) -> None:
        if (said := parts["weight_shape"].tolist()) != list(whole):
            raise ValueError(f"weight_shape says {said}, the packed numbers make {list(whole)}")
        if self.spec.act_order:
            check_groups(parts["weight_g_idx"], parts["weight_scale"].shape[1])

    def numbers(self, parts: Mapping[str, Tensor]) -> Numbers:
        import torch

        numbers, scale = unpacked(parts["weight_packed"]), parts["weight_scale"]
        zeros = torch.full(scale.shape, MIDDLE, dtype=torch.uint8, device=scale.device)
        if self.spec.zero_points:
            zeros = unpacked(parts["weight_zero_point"].t()).t()[: numbers.shape[0]]  # stored plus 8 as well
        return Numbers(numbers, scale, zeros, parts["weight_g_idx"] if self.spec.act_order else None)
