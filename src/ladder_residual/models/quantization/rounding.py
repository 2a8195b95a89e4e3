"""Weights rounded to the numbers a format has: each to the nearest, or column by column, so that later columns make up for what rounding
an earlier one lost (GPTQ, arXiv 2210.17323). The second needs the Gram matrix x^T x of what the projection reads.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, NamedTuple

from .layout import NIBBLES
from .packed_int4 import MIDDLE

if TYPE_CHECKING:
    import torch
    from torch import Tensor

DAMPING = 0.01  # of the mean of the Gram matrix's diagonal, added to it
BLOCK = 128  # columns whose losses are passed on together
CLIPS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75)  # of the largest number of a group: clipping it makes the steps of the others smaller


class Rounded(NamedTuple):
    numbers: Tensor  # [out, in], in a dtype that holds them all
    scales: Tensor  # [out, groups of columns], as they are stored

    def weight(self) -> Tensor:
        """In float32."""
        width = self.numbers.shape[1] // self.scales.shape[1]
        return self.numbers.float() * self.scales.float().repeat_interleave(width, 1)


class Format(ABC):
    """Numbers with a scale for each group of columns in a row, as compressed-tensors stores them."""

    name: str
    layout: str  # of compressed-tensors
    weights: dict[str, Any]  # its config
    activations: dict[str, Any] | None  # what a server quantises them to
    group: int | None  # columns; None: the whole row

    @abstractmethod
    def describe(self) -> str: ...

    @abstractmethod
    def scale(self, groups: Tensor) -> Tensor:
        """For float32 numbers [out, groups, columns of a group]."""

    @abstractmethod
    def nearest(self, quotients: Tensor) -> Tensor:
        """The numbers that the format has, in float32."""

    @abstractmethod
    def stored(self, module: str, rounded: Rounded) -> dict[str, Tensor]:
        """The tensors of a checkpoint."""

    def scales(self, values: Tensor, dtype: torch.dtype) -> Tensor:
        """As ``dtype`` can hold them: numbers are rounded for the scale that is stored."""
        import torch

        scales = self.scale(values.unflatten(1, (-1, self.group or values.shape[1]))).to(dtype)
        return torch.where(scales == 0, torch.ones_like(scales), scales)  # of zeros, or of numbers too small for a scale

    def round(self, name: str, weight: Tensor, dtype: torch.dtype, gram: Tensor | None = None) -> Rounded:
        """``dtype``: of the weights beside it; ``gram``: in float64, None rounds each number to the nearest."""
        import torch

        from ..finite import cast_finite

        values = cast_finite(name, weight, torch.float32)
        # float16 cannot hold the scale of small weights
        scales = self.scales(values, torch.bfloat16 if dtype == torch.bfloat16 else torch.float32)
        of_columns = scales.float().repeat_interleave(values.shape[1] // scales.shape[1], 1)
        if gram is None or not bool(gram.any()):
            return Rounded(self.nearest(values / of_columns), scales)
        return Rounded(self._compensated(values, of_columns, gram), scales)

    def _compensated(self, values: Tensor, scales: Tensor, gram: Tensor) -> Tensor:
        """Columns with much to read first: many are left then to make up for them."""
        import torch

        order = gram.diagonal().argsort(descending=True)
        values, scales, gram = values[:, order], scales[:, order], gram[order][:, order]
        gram.diagonal().add_(DAMPING * gram.diagonal().mean())
        inverse = torch.cholesky_inverse(torch.linalg.cholesky(gram))
        factor = torch.linalg.cholesky(inverse, upper=True).to(values.dtype)
        numbers, count = torch.empty_like(values), values.shape[1]
        for start in range(0, count, BLOCK):
            stop = min(start + BLOCK, count)
            lost = torch.empty_like(values[:, start:stop])
            for column in range(start, stop):
                numbers[:, column] = self.nearest(values[:, column] / scales[:, column])
                error = (values[:, column] - numbers[:, column] * scales[:, column]) / factor[column, column]
                values[:, column + 1 : stop] -= error[:, None] * factor[column, column + 1 : stop]
                lost[:, column - start] = error
            values[:, stop:] -= lost @ factor[start:stop, stop:]
        return numbers[:, order.argsort()]


class Fp8(Format):
    """E4M3 with a scale per output row; servers quantise activations as they come, so no calibration is needed."""

    name, layout, group = "fp8", "float-quantized", None
    largest = 448.0

    def __init__(self) -> None:
        e4m3 = {"num_bits": 8, "type": "float", "symmetric": True}
        self.weights = {**e4m3, "strategy": "channel", "dynamic": False}
        self.activations = {**e4m3, "strategy": "token", "dynamic": True}

    def describe(self) -> str:
        return "fp8 per channel"

    def scale(self, groups: Tensor) -> Tensor:
        return groups.abs().amax(-1) / self.largest

    def nearest(self, quotients: Tensor) -> Tensor:
        import torch

        return quotients.clamp(-self.largest, self.largest).to(torch.float8_e4m3fn).to(quotients.dtype)

    def stored(self, module: str, rounded: Rounded) -> dict[str, Tensor]:
        import torch

        return {f"{module}.weight": rounded.numbers.to(torch.float8_e4m3fn), f"{module}.weight_scale": rounded.scales}


class Int4(Format):
    """-8 to 7 with a scale per group of columns; activations stay as they are."""

    name, layout, activations = "int4", "pack-quantized", None

    def __init__(self, group: int) -> None:
        self.group = group
        self.weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": group}

    def describe(self) -> str:
        return f"int4 in groups of {self.group}"

    def scale(self, groups: Tensor) -> Tensor:
        """Of some clips the one with the least squared error."""
        import torch

        largest = groups.abs().amax(-1, keepdim=True) / (MIDDLE - 0.5)
        best, least = largest, torch.full_like(largest, torch.inf)
        for clip in CLIPS:
            scale = largest * clip
            error = (self.nearest(groups / scale.clamp_min(1e-30)) * scale - groups).square().sum(-1, keepdim=True)
            best, least = torch.where(error < least, scale, best), torch.minimum(error, least)
        return best.squeeze(-1)

    def nearest(self, quotients: Tensor) -> Tensor:
        return quotients.round().clamp(-MIDDLE, MIDDLE - 1)

    def stored(self, module: str, rounded: Rounded) -> dict[str, Tensor]:
        import torch

        rows, columns = rounded.numbers.shape
        nibbles = (rounded.numbers.to(torch.int32) + MIDDLE).view(rows, -1, NIBBLES)
        words = (nibbles << torch.arange(0, 4 * NIBBLES, 4, device=nibbles.device)).sum(-1, dtype=torch.int32)
        return {
            f"{module}.weight_packed": words,
            f"{module}.weight_scale": rounded.scales,
            f"{module}.weight_shape": torch.tensor([rows, columns]),
        }
