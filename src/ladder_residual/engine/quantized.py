"""Quantised weights as the kernels stream them: one layout for every checkpoint's format.

Numbers lie in words of 32 bits, the order within 16 bytes as ``kernels/quantized.py`` says. A scale (and a zero point, where there are
some) belongs to a row and a group of its columns; a scale of a tensor or of a block of rows is repeated for each row, at 1 to 3 % of the
bytes. A format is an entry in ``FORMATS``, and its function in ``kernels/quantized.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

WORDS = 4  # in 16 bytes
MIDDLE = 8.0  # of int4: what stands for 0 without zero points


class Format(NamedTuple):
    kernel: int  # the value of FORMAT in the kernels
    numbers: int  # in a word
    bytes_of: Callable[[Tensor], Tensor]  # uint8 (..., numbers / bytes) of numbers (..., numbers)
    numbers_of: Callable[[Tensor], Tensor]  # back, in float32

    @property
    def chunk(self) -> int:
        """Columns in 16 bytes."""
        return WORDS * self.numbers


def _nibbles(values: Tensor) -> Tensor:
    return values[..., ::2] | values[..., 1::2] << 4


def _from_nibbles(held: Tensor) -> Tensor:
    return torch.stack((held & 15, held >> 4), -1).flatten(-2).float()


FORMATS = {
    "fp8": Format(1, 4, lambda values: values.view(torch.uint8), lambda held: held.view(torch.float8_e4m3fn).float()),
    "int4": Format(2, 8, _nibbles, _from_nibbles),
}


@dataclass(frozen=True)
class QuantizedWeight:
    format: str
    words: Tensor  # int32 (rows, columns / numbers in a word)
    scales: Tensor  # (rows, groups)
    zeros: Tensor | None  # (rows, groups), int4 only
    group: int  # columns of a group; the last may have fewer

    @classmethod
    def pack(cls, format: str, values: Tensor, scales: Tensor, zeros: Tensor | None, group: int) -> QuantizedWeight:
        """``values`` (rows, columns): E4M3, or uint8 of 0 to 15."""
        made, (rows, columns) = FORMATS[format], values.shape
        if columns % made.chunk or (scales.shape[1] > 1 and group % made.chunk):
            what = f"{columns} columns in groups of {group}" if scales.shape[1] > 1 else f"{columns} columns"
            raise ValueError(
                f"{what}: the CUDA engine reads {format} by {made.chunk} columns; use fewer ranks or --engine torch"
            )
        by_word = values.reshape(rows, -1, made.numbers, WORDS).transpose(2, 3).contiguous()
        words = made.bytes_of(by_word).view(rows, -1).view(torch.int32)
        return cls(format, words, scales.contiguous(), None if zeros is None else zeros.to(scales.dtype).contiguous(), group)

    @property
    def shape(self) -> tuple[int, int]:
        return self.words.shape[0], self.words.shape[1] * FORMATS[self.format].numbers

    def to(self, device: str) -> QuantizedWeight:
        zeros = None if self.zeros is None else self.zeros.to(device)
        return replace(self, words=self.words.to(device), scales=self.scales.to(device), zeros=zeros)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in (self.words, self.scales, self.zeros) if part is not None)

    @property
    def constants(self) -> dict[str, Any]:
        """Of a kernel that reads it. GROUP 0: a scale per row, multiplied with the output."""
        made = FORMATS[self.format]
        by_row = self.scales.shape[1] == 1 and self.format == "fp8"
        return {"PACK": made.numbers, "GROUP": 0 if by_row else self.group, "FORMAT": made.kernel}

    def float(self) -> Tensor:
        """Dequantised, in plain torch: the slow twin of ``dense``."""
        made, (rows, columns) = FORMATS[self.format], self.shape
        held = self.words.view(torch.uint8).view(rows, columns // made.chunk, WORDS, -1)
        numbers = made.numbers_of(held).transpose(2, 3).reshape(rows, columns)
        group = torch.arange(columns, device=numbers.device) // self.group
        if self.format == "int4":
            numbers -= MIDDLE if self.zeros is None else self.zeros.float()[:, group]
        return numbers * self.scales.float()[:, group]


Weight = Tensor | QuantizedWeight


def stacked(parts: Sequence[Weight]) -> Weight:
    """Row over row. Parts of several formats cannot share a kernel."""
    plain = [part for part in parts if isinstance(part, Tensor)]
    if len(plain) == len(parts):
        return torch.cat(plain) if len(plain) > 1 else plain[0].contiguous()
    kinds = {_kind(part) for part in parts}
    if len(kinds) > 1:
        raise ValueError(
            f"weights that one kernel reads differ ({'; '.join(sorted(kinds))}): the CUDA engine "
            "needs q, k and v alike, and gate and up; use --engine torch"
        )
    found: list[Any] = list(parts)

    def joined(name: str) -> Tensor:
        return torch.cat([getattr(part, name) for part in found])

    zeros = None if found[0].zeros is None else joined("zeros")
    return QuantizedWeight(found[0].format, joined("words"), joined("scales"), zeros, found[0].group)


def _kind(weight: Weight) -> str:
    if isinstance(weight, Tensor):
        return str(weight.dtype)
    zeros = "" if weight.zeros is None else ", zero points"
    return f"{weight.format}, {weight.scales.shape[1]} scales of {weight.scales.dtype} a row{zeros}"


def dense(weight: Weight, dtype: torch.dtype) -> Tensor:
    """For a GEMM of torch: the weight itself, or dequantised for this one use."""
    if isinstance(weight, Tensor):
        return weight
    from .kernels.quantized import dequantize

    rows, columns = weight.shape
    out = torch.empty(rows, columns, dtype=dtype, device=weight.words.device)
    grid = (rows, -(-columns // 4096))
    dequantize[grid](weight.words, weight.scales, weight.zeros, out, K=columns, BLOCK_K=4096, num_warps=4, **weight.constants)
    return out


def rounded(weight: Tensor, format: str, group: int | None = None, zero_points: bool = False) -> QuantizedWeight:
    """Quantised by rounding to the nearest, for benchmarks and tests: a scale per row, or per ``group`` of columns."""
    rows, columns = weight.shape
    size = group or columns
    parts = weight.float().view(rows, -1, size)
    if format == "fp8":
        scales = (parts.abs().amax(2).clamp(min=1e-12) / 448).to(torch.bfloat16)
        values = (parts / scales.float().unsqueeze(2)).clamp(-448, 448).to(torch.float8_e4m3fn)
        return QuantizedWeight.pack(format, values.view(rows, columns), scales, None, size)
    low, high = parts.amin(2), parts.amax(2)
    scales = ((high - low) / 15 if zero_points else torch.maximum(high, -low) / 7.5).clamp(min=1e-12).to(torch.bfloat16)
    zeros = (-low / scales.float()).round().clamp(0, 15) if zero_points else None
    middle: Any = MIDDLE if zeros is None else zeros.unsqueeze(2)
    values = ((parts / scales.float().unsqueeze(2)).round() + middle).clamp(0, 15).to(torch.uint8)
    return QuantizedWeight.pack(format, values.view(rows, columns), scales, zeros, size)
