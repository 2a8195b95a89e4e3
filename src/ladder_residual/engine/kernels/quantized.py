"""Quantised weights in the kernels: how a tile is read, and the numbers in it.

An element of such a matrix is a word of 32 bits with PACK numbers. Sixteen bytes, four words, hold neighbouring columns of a row, and
place p of word i is column 4 * p + i of them (``engine/quantized.py`` packs so): a thread that reads 16 bytes meets x in runs of four,
which it loads itself. In a GEMV x is therefore a tile [1, PACK, words], as ``columns`` says, and weights are one of [rows, 1, words]:
loaded with as many dimensions, both lie in registers alike, and nothing passes through shared memory.

A format is the functions that decode its words. Integer instructions run at half the rate of others, so there are few of them: bits are
put where a float32 has its own, and the factor that is missing is made up for elsewhere, once for many.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..quantized import FORMATS

PLAIN = tl.constexpr(0)  # values of a kernel's FORMAT argument
FP8 = tl.constexpr(FORMATS["fp8"].kernel)
INT4 = tl.constexpr(FORMATS["int4"].kernel)
WORDS = tl.constexpr(4)  # in 16 bytes


@triton.jit
def fp8_bits(w, place):
    """E4M3 as the upper bits of a float32, behind four zeros of exponent: 2^-120 of the number. Two numbers of a word move at once."""
    odd = place % 2 == 1  # the upper byte of each half
    bits = tl.where(odd, w >> 4, w << 4) & 0x07F007F0 | tl.where(odd, w, w << 8) & -0x7FFF8000
    return tl.where(place >= 2, bits & -0x10000, bits << 16)


@triton.jit
def int4_bits(w, place):
    """Four bits where they are in a half: 16^(place % 4) times the number, as an integer or in units of 2^-149 as a float32."""
    return tl.where(place >= 4, w >> 16, w) & (15 << (4 * (place % 4)))


@triton.jit
def small_floats(w, place, FORMAT: tl.constexpr):
    """The numbers at ``place`` of words, as float32 of tiny size: a multiplication is all they take, which takes them as they are."""
    bits = fp8_bits(w, place) if FORMAT == FP8 else int4_bits(w, place)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def enlarged(x, place, FORMAT: tl.constexpr):
    """What to multiply ``small_floats`` with instead of x, so that ``1 / unit`` of the product is left."""
    if FORMAT == FP8:
        return x
    else:
        return x * tl.where(
            place % 4 == 0, 2.0**80, tl.where(place % 4 == 1, 2.0**76, tl.where(place % 4 == 2, 2.0**72, 2.0**68))
        )


@triton.jit
def unit(FORMAT: tl.constexpr):
    return 2.0**120 if FORMAT == FP8 else 2.0**69


@triton.jit
def columns(WIDTH: tl.constexpr, PACK: tl.constexpr, FORMAT: tl.constexpr):
    """Of x, in the order of a tile's numbers."""
    if FORMAT == PLAIN:
        return tl.arange(0, WIDTH)
    else:
        return word_columns(WIDTH, PACK)[None, None, :] + (tl.arange(0, PACK) * WORDS)[None, :, None]


@triton.jit
def word_columns(WIDTH: tl.constexpr, PACK: tl.constexpr):
    """The column of the first number of each word."""
    word = tl.arange(0, WIDTH // PACK)
    return word // WORDS * (WORDS * PACK) + word % WORDS


@triton.jit
def load_words(ptrs, mask):
    """A tile (rows, words), with a dimension for places between."""
    return tl.load(ptrs[:, None, :], mask=mask[:, None, :], other=0, eviction_policy="evict_first")


@triton.jit
def load_scales(scale_ptr, zero_ptr, rows, row_mask, at, K: tl.constexpr, GROUP: tl.constexpr):
    """Of the group that each column of ``at`` is in, by row: (scales,), or (scales, zero points). A tile is its words before these."""
    places = rows[:, None] * ((K + GROUP - 1) // GROUP) + (at // GROUP)[None, :]
    mask = row_mask[:, None] & (at < K)[None, :]
    scales = tl.load(scale_ptr + places, mask=mask, other=0.0)
    if zero_ptr is None:
        return (scales,)
    else:
        return scales, tl.load(zero_ptr + places, mask=mask, other=0.0)


@triton.jit
def zero_points(tile):
    """What stands for 0 in a group."""
    if len(tile) > 2:
        return tile[2].to(tl.float32)
    else:
        return 8.0


@triton.jit
def multiply_numbers(tile, x, ROWS: tl.constexpr, WIDTH: tl.constexpr, PACK: tl.constexpr, FORMAT: tl.constexpr):
    """A tile of words (ROWS, 1, words) times x [1, PACK, words]: partial sums (ROWS, 16 bytes each), scaled if the tile has scales."""
    place = tl.arange(0, PACK)[None, :, None]
    y = _by_16_bytes(small_floats(tile[0], place, FORMAT) * enlarged(x, place, FORMAT), ROWS, WIDTH // PACK) * unit(FORMAT)
    if FORMAT == INT4:
        y -= zero_points(tile) * _by_16_bytes(x, 1, WIDTH // PACK)
    if len(tile) > 1:
        y *= tile[1].to(tl.float32)
    return y


@triton.jit
def _by_16_bytes(products, ROWS: tl.constexpr, COUNT: tl.constexpr):
    return tl.sum(tl.reshape(tl.sum(products, axis=1), [ROWS, COUNT // WORDS, WORDS]), axis=2)


@triton.jit
def weights_at(tile, PLACE: tl.constexpr, FORMAT: tl.constexpr):
    """The weights at one place of words, float32; without scales in the tile, the output is still to be scaled."""
    place = tl.full([1, 1], PLACE, tl.int32)
    if FORMAT == FP8:
        numbers = small_floats(tile[0], place, FORMAT) * unit(FORMAT)
    else:  # in the mantissa of 2^23
        numbers = (int4_bits(tile[0], place) | 0x4B000000).to(tl.float32, bitcast=True)
        numbers = (numbers - 8388608.0) * 16.0 ** -(PLACE % 4) - zero_points(tile)
    if len(tile) > 1:
        numbers *= tile[1].to(tl.float32)
    return numbers


@triton.jit
def dequantize(
    w_ptr, scale_ptr, zero_ptr, out_ptr, K: tl.constexpr, BLOCK_K: tl.constexpr, PACK: tl.constexpr, GROUP: tl.constexpr,
    FORMAT: tl.constexpr,
):  # fmt: skip
    """A row's weights in the type of ``out_ptr``, for GEMMs that are bound by arithmetic."""
    rows = tl.program_id(0) + tl.arange(0, 1)
    first = tl.program_id(1) * BLOCK_K
    words = tl.arange(0, BLOCK_K // PACK)
    inside = rows >= 0
    at = first + word_columns(BLOCK_K, PACK)
    w_ptrs = w_ptr + rows.to(tl.int64)[:, None] * (K // PACK) + (first // PACK + words)[None, :]
    w = tl.load(w_ptrs, mask=(at < K)[None, :], other=0, eviction_policy="evict_first")
    if GROUP == 0:
        tile = (w, tl.load(scale_ptr + rows)[:, None])
    else:
        tile = (w,) + load_scales(scale_ptr, zero_ptr, rows, inside, at, K, GROUP)
    for place in tl.static_range(PACK):
        y = weights_at(tile, place, FORMAT)
        to = out_ptr + rows.to(tl.int64)[:, None] * K + (at + WORDS * place)[None, :]
        tl.store(to, y.to(out_ptr.dtype.element_ty), mask=(at < K)[None, :])
