"""fp8 weights (E4M3): a number per weight, and a scale per tensor, output row or block."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ..sharding import ShardSpec
from .layout import PLAIN, SCALES, Layout, Numbers, ShardSpecs, Stored, expect, scaled_down, take
from .spec import QuantSpec

if TYPE_CHECKING:
    from torch import Tensor

DTYPE = "F8_E4M3"


class Fp8(Layout):
    main = "weight"
    of_activations = ("input_scale", "input_scale_ub", "activation_scale")  # not needed: activations stay as they are

    def __init__(self, spec: QuantSpec) -> None:
        super().__init__(spec)
        # The factor to multiply with; in this format it is called the inverse.
        self.scales = ("weight_scale_inv", "weight_scale") if spec.method == "fp8" else ("weight_scale",)
        self.parts = (self.main, *self.scales, *self.of_activations)

    def is_quantised(self, held: Mapping[str, Stored]) -> bool:
        """Plain layers have a ``weight`` too."""
        return self.main in held and (held[self.main].dtype not in PLAIN or any(scale in held for scale in self.scales))

    def shape(self, held: Mapping[str, Stored]) -> tuple[int, int]:
        found = take(held, self.main, (DTYPE,))
        if len(found) != 2:
            raise ValueError(f"{self.main} has shape {list(found)}, expected a matrix")
        rows, columns = found
        name, *more = [scale for scale in self.scales if scale in held] or self.scales[:1]
        if more:
            raise ValueError(f"has both {name} and {more[0]}: one of them is wrong")
        scale = take(held, name, SCALES)
        if self.spec.block:
            expect(name, scale, (-(-rows // self.spec.block[0]), -(-columns // self.spec.block[1])))
        elif self.spec.scales == "channel":
            expect(name, scale, (rows, 1), (rows,))
        else:
            expect(name, scale, (), (1,))
        return rows, columns

    def shard_specs(self, whole: tuple[int, int], spec: ShardSpec | None) -> ShardSpecs:
        scale = None
        if spec and self.spec.block:
            side = self.spec.block[spec.dim]
            scale = scaled_down(spec, side, whole[spec.dim], spec.dim, f"blocks of {side}")
        elif spec and spec.dim == 0 and self.spec.scales == "channel":
            scale = spec
        return {self.main: spec, **dict.fromkeys(self.scales, scale)}

    def numbers(self, parts: Mapping[str, Tensor]) -> Numbers:
        import torch

        weight = parts[self.main]
        rows, columns = weight.shape
        scale = next(parts[name] for name in self.scales if name in parts)
        if self.spec.block is None:
            return Numbers(weight, scale.reshape(-1, 1).expand(rows, 1), None, None)
        height, width = self.spec.block
        scale = scale.repeat_interleave(min(height, rows), 0)[:rows]
        whole_blocks = columns % width == 0 or scale.shape[1] == 1
        return Numbers(weight, scale, None, None if whole_blocks else torch.arange(columns, device=weight.device) // width)
