"""Tile sizes of the engine's own kernels, and the sets of them that an engine times at start-up."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..quantized import FORMATS, QuantizedWeight, Weight
from ..spec import RankSizes

REDUCTION_BYTES = 4096  # of shared memory beside the tiles, more than a reduction over a program's threads takes
WIDEST_PERSISTENT = 8192  # hidden size: x and two tiles must fit a thread's registers


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def next_power_of_2(value: int) -> int:
    return 1 << (value - 1).bit_length()


def previous_power_of_2(value: int) -> int:
    return 1 << (max(value, 1).bit_length() - 1)


@dataclass(frozen=True)
class Tile:
    """How one kernel is launched. It is persistent (``kernels/persistent_gemv.py``) if ``programs_per_sm`` is not 0."""

    rows: int  # of W per program
    block_k: int
    num_warps: int
    num_stages: int = 2  # tiles loaded ahead of use: 1 to 3 in registers (one token), more in shared memory (small batches)
    programs_per_sm: int = 0  # persistent programs, which hold all of x and loop over the rows; 0: a program for each ``rows``
    prefetch_second: bool = False  # persistent: load the second block of rows before the first is multiplied
    smem_tiles: int = 0  # persistent: blocks in shared memory, loaded before the input is complete; 0: one, in registers
    packed: bool = False  # not persistent: read weights in packed pairs, as persistent kernels always do
    max_registers: int | None = None  # per thread; None: the compiler's choice
    l2_prefetch_bytes: int = 0  # persistent gate/up: of out_proj's weights, by each program while it waits for an all-reduce
    tail_share: float = (
        1  # persistent: the share of the programs, the first ones, that compute the last round (``block_counts``)
    )
    trigger_after: float = 0  # persistent, interleaved: the share of a program's blocks after which it triggers the next kernel

    def weight_view(self, weight: Weight) -> tuple[tuple[Tensor, Tensor | None, Tensor | None], dict[str, Any]]:
        """What a kernel that is not persistent reads (weights, scales, zero points), and the constants that tell it what they are."""
        if isinstance(weight, QuantizedWeight):
            return (weight.words, weight.scales, weight.zeros), weight.constants
        pack = 2 if self.packed and weight.shape[-1] % 2 == 0 else 1
        return (packed(weight) if pack == 2 else weight, None, None), {"PACK": pack, "GROUP": 0, "FORMAT": 0}

    def l2_prefetch(self, programs: int, pairs: Tensor) -> int:
        """How many packed pairs each program prefetches: whole 16 bytes, no more than there are."""
        return min(self.l2_prefetch_bytes // pairs.element_size(), pairs.numel() // programs) // 4 * 4


@dataclass(frozen=True)
class GemvTiles:
    """Tiles of all kernels of one token's step."""

    qkv: Tile
    output: Tile
    gate_up: Tile
    down: Tile
    head: Tile
    split_k: int  # of the QKV projection, whose few rows would not fill the GPU; attention adds the parts
    kv_splits: int  # programs per KV head in attention, each over a part of the context
    block_kv: int = 64
    attention_warps: int = 8
    smem_carveout: int | None = None  # per cent, of all kernels (``cuda/smem_carveout.py``); None: the driver's choice for each
    pdl_all_reduce: bool = False  # launch all-reduces beside the chain before their input is complete (``executor.py``)
    schedules: tuple[str, ...] = ("serial", "two_stream", "interleaved")  # that the set is for

    def __post_init__(self) -> None:
        if self.qkv.programs_per_sm and self.split_k > 1:
            raise ValueError(f"a persistent QKV kernel takes whole rows, not split_k={self.split_k}: set split_k=1")

    @classmethod
    def candidates(
        cls, sizes: RankSizes, max_context: int, itemsize: int = 2, max_shared_memory: int = 227 << 10
    ) -> list[GemvTiles]:  # fmt: skip
        """Sets that were best on an H200 for a 70B rank of TP=8 (serial; serial with slow all-reduces; two_stream; interleaved) and for a
        whole 8B model. Which one wins depends on the shard and on what else runs on the GPU, so the engine times them. ``itemsize`` of a
        weight and the ``max_shared_memory`` of a program say which fit."""
        split_k = 2 if sizes.hidden % 2048 == 0 and sizes.qkv_width * sizes.hidden <= 1 << 24 else 1
        few_rows = split_k > 1
        splits = pick_kv_splits(sizes, max_context, 1)
        half = max(splits // 2, 1)
        qkv, inner, hidden, ff = sizes.hidden // split_k, sizes.heads * sizes.head_dim, sizes.hidden, sizes.intermediate
        head = _tile(8, 4, 1, hidden)  # rows, warps, stages, and columns of the matrix; a set: QKV, output, gate/up, down, head
        rank = [
            cls(_tile(4, 4, 1, qkv), _tile(4, 2, 1, inner), _tile(16, 2, 1, hidden), _tile(8, 2, 2, ff), head, split_k, splits),
            cls(_tile(4, 4, 1, qkv), _tile(16, 2, 1, inner), _tile(16, 2, 1, hidden), _tile(4, 4, 1, ff), head, split_k, half),
        ]
        whole = [
            cls(_tile(8, 2, 1, qkv), _tile(4, 4, 1, inner), _tile(4, 4, 1, hidden), _tile(4, 8, 1, ff), head, split_k, splits),
            cls(_tile(4, 4, 1, qkv), _tile(8, 2, 1, inner), _tile(8, 4, 1, hidden), _tile(8, 2, 2, ff), head, split_k, half),
        ]
        if hidden > WIDEST_PERSISTENT:
            return rank + whole if few_rows else whole + rank
        # Packed weights: faster for a 70B rank, serial and interleaved; gate/up takes more registers with them unless it is persistent.
        persistent, down = _persistent(4, hidden), _tile(8, 4, 1, ff)
        serial = replace(rank[0], gate_up=persistent, down=down).with_packed_weights()
        two_stream = replace(
            rank[0], qkv=_persistent(2, hidden), output=_tile(16, 4, 1, inner), down=down, split_k=1, attention_warps=4
        )  # fmt: skip
        slow_link = replace(
            serial, gate_up=replace(persistent, smem_tiles=3, max_registers=None), smem_carveout=100, pdl_all_reduce=True
        )  # fmt: skip
        smem_bytes = 3 * persistent.rows * persistent.block_k * itemsize + REDUCTION_BYTES
        fits = itemsize == 2 and smem_bytes <= max_shared_memory
        wide = replace(serial, output=_tile(8, 4, 1, inner), down=_tile(4, 8, 1, ff)).with_packed_weights()
        rank = [serial, *([slow_link] if fits else []), wide, two_stream, rank[0]]
        more_registers = replace(persistent, max_registers=96)
        first = replace(whole[0], qkv=more_registers, gate_up=more_registers, kv_splits=half, split_k=1, attention_warps=4)
        whole = [first, *whole]
        made = rank + whole[:1] if few_rows else whole + rank[:1]
        # Only persistent kernels can read before they wait. Beside them, which leave four of an H200's SMs free, sixteen programs of
        # attention were a little better than eight; more would queue, unless the context is so long that each would take too long.
        beside = min(splits, previous_power_of_2(max(16 // sizes.kv_heads, max_context // 320)))
        narrow = replace(wide.down, max_registers=48 if itemsize == 2 else None)
        gate_up = replace(
            persistent, trigger_after=0.7, prefetch_second=True, tail_share=0.5, l2_prefetch_bytes=16 << 10, max_registers=112
        )  # fmt: skip
        interleaved = replace(
            serial, qkv=persistent, gate_up=gate_up, down=narrow, split_k=1, kv_splits=beside, attention_warps=4, pdl_all_reduce=True
        )  # fmt: skip
        # Half the programs of attention with more of L2 prefetched are as good: which is better depends on the GPU.
        fewer = replace(
            interleaved, gate_up=replace(gate_up, l2_prefetch_bytes=24 << 10), kv_splits=max(beside // 2, 1)
        )  # fmt: skip
        return [
            *(replace(tiles, schedules=("serial", "two_stream")) for tiles in made),
            *(replace(tiles, schedules=("interleaved",)) for tiles in (interleaved, fewer, made[0])),
        ]

    @classmethod
    def quantized(cls, sizes: RankSizes, max_context: int, format: str) -> list[GemvTiles]:
        """Sets for quantised weights, not tuned on a GPU yet: fewer rows where the input takes registers too, more where it is small."""
        split_k = 2 if sizes.hidden % 2048 == 0 and sizes.qkv_width * sizes.hidden <= 1 << 24 else 1
        splits = pick_kv_splits(sizes, max_context, 1)
        qkv, inner, hidden, ff = sizes.hidden // split_k, sizes.heads * sizes.head_dim, sizes.hidden, sizes.intermediate
        numbers = FORMATS[format].numbers

        def tile(rows: int, warps: int, columns: int) -> Tile:
            return _tile(rows, warps, 1, columns, 128 * numbers)

        few, many = (4, 8) if format == "fp8" else (4, 4)
        head = _tile(8, 4, 1, hidden)
        return [
            cls(
                tile(few, warps, qkv), tile(few, warps, inner), tile(rows, warps, hidden), tile(rows, warps, ff), head, split_k,
                splits,
            )
            for rows, warps in ((many, 2), (many, 4), (few, 1), (few, 4))
        ]  # fmt: skip

    def with_packed_weights(self) -> GemvTiles:
        """The same set with packed weights in every kernel that is not persistent."""
        names = ("qkv", "output", "gate_up", "down", "head")
        tiles = {name: getattr(self, name) for name in names}
        return replace(self, **{name: replace(tile, packed=not tile.programs_per_sm) for name, tile in tiles.items()})


def _persistent(rows: int, hidden: int) -> Tile:
    """Sixteen columns a thread (fewer in the smallest models), 512 threads an SM. The registers they leave let the next kernel start
    early and an all-reduce run beside; with two rows they take few anyway, and a limit makes the compiler use them up."""
    width = next_power_of_2(hidden)
    warps = max(width // 512, 1)
    return Tile(rows, width, warps, programs_per_sm=16 // warps, max_registers=88 if rows > 2 else None)


def _tile(rows: int, warps: int, stages: int, columns: int, by_warp: int = 256) -> Tile:
    """256 columns a warp (``kernels/gemv.py`` says why), fewer warps where the matrix is narrower than that."""
    while warps > 1 and by_warp * warps > columns:
        warps //= 2
    return Tile(rows, by_warp * warps, warps, stages)


def pick_kv_splits(sizes: RankSizes, max_context: int, batch: int) -> int:
    """Enough programs for short latency; no more than the merge can read cheaply, unless the context is long."""
    wanted = max(1, 264 // (batch * sizes.kv_heads))
    by_length = max(1, max_context // 64)
    limit = 32 if max_context <= 32768 else 64
    return min(limit, previous_power_of_2(wanted), previous_power_of_2(by_length))


def persistent_programs(blocks: int, most: int) -> int:
    """No more programs than shorten the longest loop, so that all-reduces find free SMs."""
    return ceil_div(blocks, ceil_div(blocks, most))


def block_counts(blocks: int, programs: int, tail_share: float) -> tuple[int, int, int]:
    """Blocks of every program, blocks of the first ones, and how many these are. Programs that find a free SM at once start before those
    that wait for one; with a ``tail_share`` below 1 they alone share the last rounds."""
    each, first, rounds = blocks // programs, programs, ceil_div(blocks, programs)
    if tail_share < 1 and rounds > 2:
        each, first = rounds - 1, math.ceil(tail_share * programs)
    return each, each + ceil_div(blocks - each * programs, first), first


def packed(weight: Tensor) -> Tensor:
    """The same weights in pairs: two of 16 bits as one int32, two of float32 as one int64."""
    return weight.view(torch.int64 if weight.element_size() == 4 else torch.int32)


MIN_PROGRAMS = 100  # that, with this many stages, keep the memory of an H100 or H200 busy
# By rows, the fastest of a dozen shapes on an H200 (batches 4 and 12): a warp for each 16 rows, and stages enough to cover the memory's
# latency. More warps read the same rows out of shared memory again.
SMALL_BATCH_TILES = {64: Tile(64, 256, 4, 3), 32: Tile(32, 128, 2, 8), 16: Tile(16, 128, 1, 8)}


@dataclass(frozen=True)
class SmallBatchTiles:
    """Tiles of the GEMMs of 2 to 16 sequences."""

    max_rows: int  # per program, where gate and up do not share one
    split_k: int  # of the QKV projection, whose few rows would not fill the GPU; attention adds the parts

    @classmethod
    def candidates(cls, sizes: RankSizes) -> list[SmallBatchTiles]:
        """Which one wins depends on the shard and on what else runs on the GPU: the engine times them."""
        split_k = 1
        while split_k < 4 and split_k * sizes.qkv_width < 16 * 2 * MIN_PROGRAMS and sizes.hidden % (2 * split_k * 128) == 0:
            split_k *= 2
        largest = max(sizes.hidden, sizes.vocab_rows, sizes.qkv_width)  # rows of the weights that are not gated
        smallest = min(SMALL_BATCH_TILES)
        return [cls(rows, split_k) for rows in SMALL_BATCH_TILES if rows == smallest or largest // rows >= MIN_PROGRAMS]

    def tile(self, weight_rows: int, *, gated: bool) -> Tile:
        """For a weight of ``weight_rows`` rows. Gate and up share a program's registers, so each gets the fewest rows."""
        fitting = [
            rows for rows in SMALL_BATCH_TILES if not gated and rows <= self.max_rows and weight_rows // rows >= MIN_PROGRAMS
        ]
        return SMALL_BATCH_TILES[max(fitting, default=min(SMALL_BATCH_TILES))]
