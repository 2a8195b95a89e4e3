"""Modules of a decode step for one token: five kernels a layer (QKV, attention, output, gate/up, down), all Triton."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ._triton import triton
from .cache import KVCache
from .lane import Lane
from .launcher import Launcher
from .multiprocessors import hopper, multiprocessors
from .schedule import Step
from .spec import EngineSpec, RankSizes
from .weights import LayerWeights, RankWeights


@dataclass(frozen=True)
class Tile:
    rows: int  # rows of W per program
    block_k: int
    warps: int
    depth: int = 2  # tiles requested ahead of use: 1 to 3 in registers (one token), more in shared memory (row_ops.py)
    walkers: int = 0  # programs a multiprocessor that hold all of x and walk over the rows; 0: a program for each ``rows``
    second: bool = False  # of walkers: their second block is asked for before the first is multiplied (kernels_walk.py)
    shared: int = 0  # of walkers: tiles in shared memory, requested before their input is there; 0: one, in registers
    paired: bool = (
        False  # of a program of a few rows: whether it reads two weights as one (kernels_project.py), as walkers always do
    )
    registers: int | None = None  # of a thread, at most; None: the compiler's choice
    later: int = 0  # of gate/up's walkers: bytes of the output product's weights each asks for while it waits for a sum
    lead: float = 1  # of walkers: the share of them, the first ones, that take over the last round of all (``shares``)
    turn: float = 0  # of walkers in a woven line: the share of their walk after which the next product may begin

    def words(self, weight: Tensor) -> tuple[Tensor, int]:
        """As a program of a few rows reads it, and how many weights are one element."""
        return (paired(weight), 2) if self.paired and weight.shape[-1] % 2 == 0 else (weight, 1)

    def asked_by(self, programs: int, pairs: Tensor) -> int:
        """How many pairs of the weights of a later kernel each program asks for: whole 16 bytes, no more than there are."""
        return min(self.later // pairs.element_size(), pairs.numel() // programs) // 4 * 4


@dataclass(frozen=True)
class GemvTiles:
    """Tile sizes of one shard. The defaults are what an H200 liked best; see docs/benchmarks.md for how they were found."""

    qkv: Tile
    output: Tile
    gate_up: Tile
    down: Tile
    head: Tile
    slices: int  # QKV is cut along K so that its few rows still fill the card; attention sums the slices
    splits: int  # programs per KV head in attention
    block_t: int = 64
    attention_warps: int = 8
    carveout: int | None = None  # per cent of L1 that all kernels give to shared memory (carveout.py); None: each its own
    early_sums: bool = False  # sums beside the line may begin before their message is there (execute.py)
    schedules: tuple[str, ...] = ("one", "two", "woven")  # that it is made for

    def __post_init__(self) -> None:
        if self.qkv.walkers and self.slices > 1:
            raise ValueError(f"QKV by walkers takes whole rows, not {self.slices} slices of them: set slices=1")

    @classmethod
    def candidates(cls, sizes: RankSizes, max_context: int, itemsize: int = 2, shared: int = 227 << 10) -> list[GemvTiles]:
        """Sets that were best on an H200 for a 70B rank of TP=8 (one lane; one lane waiting for slow sums; two lanes) and for a whole
        8B model. Which one wins depends on the shard and on what else is on the card, so the engine times them at start-up. ``itemsize``
        of a weight and the ``shared`` memory of a program say which fit."""
        slices = 2 if sizes.hidden % 2048 == 0 and sizes.qkv_width * sizes.hidden <= 1 << 24 else 1
        few_rows = slices > 1
        splits = pick_splits(sizes, max_context, 1)
        half = max(splits // 2, 1)
        qkv, inner, hidden, ff = sizes.hidden // slices, sizes.heads * sizes.head_dim, sizes.hidden, sizes.intermediate
        head = _tile(8, 4, 1, hidden)
        rank = [
            cls(_tile(4, 4, 1, qkv), _tile(4, 2, 1, inner), _tile(16, 2, 1, hidden), _tile(8, 2, 2, ff), head, slices, splits),
            cls(_tile(4, 4, 1, qkv), _tile(16, 2, 1, inner), _tile(16, 2, 1, hidden), _tile(4, 4, 1, ff), head, slices, half),
        ]
        whole = [
            cls(_tile(8, 2, 1, qkv), _tile(4, 4, 1, inner), _tile(4, 4, 1, hidden), _tile(4, 8, 1, ff), head, slices, splits),
            cls(_tile(4, 4, 1, qkv), _tile(8, 2, 1, inner), _tile(8, 4, 1, hidden), _tile(8, 2, 2, ff), head, slices, half),
        ]
        if hidden > WIDEST_WALK:
            return rank + whole if few_rows else whole + rank
        # Pairs: faster for a 70B rank in one lane and woven; more registers for gate/up by a few rows. Registers of walkers: as timed.
        walk, down = _walk(4, hidden), _tile(8, 4, 1, ff)
        one = replace(rank[0], gate_up=walk, down=down).in_pairs()
        two = replace(rank[0], qkv=_walk(2, hidden), output=_tile(16, 4, 1, inner), down=down, slices=1, attention_warps=4)
        waiting = replace(one, gate_up=replace(walk, shared=3, registers=None), carveout=100, early_sums=True)
        fits = itemsize == 2 and 3 * walk.rows * walk.block_k * itemsize + SCRATCH <= shared
        wide = replace(one, output=_tile(8, 4, 1, inner), down=_tile(4, 8, 1, ff)).in_pairs()
        rank = [one, *([waiting] if fits else []), wide, two, rank[0]]
        wider = replace(walk, registers=96)
        whole = [replace(whole[0], qkv=wider, gate_up=wider, splits=half, slices=1, attention_warps=4), *whole]
        made = rank + whole[:1] if few_rows else whole + rank[:1]
        # A woven line reads before it waits only by walkers. Beside those, which leave four of an H200's multiprocessors, sixteen programs
        # of attention were a little better than eight; more would queue, unless the context is so long that each would lag.
        beside = min(splits, _power_of_two_below(max(16 // sizes.kv_heads, max_context // 320)))
        narrow = replace(wide.down, registers=48 if itemsize == 2 else None)
        turned = replace(walk, turn=0.7, second=True, lead=0.5, later=16 << 10, registers=112)
        woven = replace(
            one, qkv=walk, gate_up=turned, down=narrow, slices=1, splits=beside, attention_warps=4, early_sums=True
        )  # fmt: skip
        # Half the programs of attention and more of the weights behind them are as good: which is better hangs on the card.
        fewer = replace(woven, gate_up=replace(turned, later=24 << 10), splits=max(beside // 2, 1))
        return [
            *(replace(tiles, schedules=("one", "two")) for tiles in made),
            *(replace(tiles, schedules=("woven",)) for tiles in (woven, fewer, made[0])),
        ]

    def in_pairs(self) -> GemvTiles:
        q, o, g, d, h = (replace(t, paired=not t.walkers) for t in (self.qkv, self.output, self.gate_up, self.down, self.head))
        return replace(self, qkv=q, output=o, gate_up=g, down=d, head=h)


SCRATCH = 4096  # bytes of shared memory beside the tiles, more than a sum over a program's threads takes
WIDEST_WALK = 8192  # x and two tiles must fit a thread's registers


def _walk(rows: int, hidden: int) -> Tile:
    """Sixteen columns a thread (fewer in the smallest models), 512 threads a multiprocessor. The registers they leave let the next
    kernel begin early and a sum run beside; with two rows they take few anyway, and a limit makes the compiler use them up."""
    width = triton.next_power_of_2(hidden)
    warps = max(width // 512, 1)
    return Tile(rows, width, warps, walkers=16 // warps, registers=88 if rows > 2 else None)


def _tile(rows: int, warps: int, depth: int, columns: int) -> Tile:
    """256 columns a warp (kernels_project.py says why), fewer warps where the matrix is narrower than that."""
    while warps > 1 and 256 * warps > columns:
        warps //= 2
    return Tile(rows, 256 * warps, warps, depth)


def pick_splits(sizes: RankSizes, max_context: int, batch: int) -> int:
    """Enough programs for short latency; no more than the merge can read cheaply, unless the context is long."""
    wanted = max(1, 264 // (batch * sizes.kv_heads))
    by_length = max(1, max_context // 64)
    limit = 32 if max_context <= 32768 else 64
    return min(limit, _power_of_two_below(wanted), _power_of_two_below(by_length))


def walking(blocks: int, most: int) -> int:
    """Programs that walk over ``blocks``: none that would not shorten the longest walk, so that sums find free multiprocessors."""
    return triton.cdiv(blocks, triton.cdiv(blocks, most))


def shares(blocks: int, programs: int, lead: float) -> tuple[int, int, int]:
    """Blocks that each program walks over, blocks that the first ones walk over, and how many these are. Programs that find a free
    multiprocessor at once begin before those that wait for one; with a ``lead`` below 1 they alone share the last rounds."""
    few, early, rounds = blocks // programs, programs, triton.cdiv(blocks, programs)
    if lead < 1 and rounds > 2:
        few, early = rounds - 1, math.ceil(lead * programs)
    return few, few + triton.cdiv(blocks - few * programs, early), early


def _power_of_two_below(value: int) -> int:
    return 1 << (max(value, 1).bit_length() - 1)


def paired(weight: Tensor) -> Tensor:
    """The same weights two by two, as the kernels read them (kernels_project.py)."""
    return weight.view(torch.int64 if weight.element_size() == 4 else torch.int32)


def embed_tokens(sizes: RankSizes, table: Tensor, tokens: Tensor, message: Tensor) -> None:
    """The first kernel of a step: an ordinary launch, so that everything after it may rely on the previous step being over."""
    from .kernels_small import embed

    grid = (tokens.numel(), triton.cdiv(sizes.hidden, 1024))
    embed[grid](tokens, table, message, sizes.vocab_first, sizes.vocab_rows, sizes.hidden, BLOCK=1024, num_warps=4)


class GemvOps:
    """Batch 1. Writes each module's message into the buffer it is given."""

    def __init__(
        self, spec: EngineSpec, sizes: RankSizes, weights: RankWeights, cache: KVCache, tiles: GemvTiles, *, pdl: int = 1,
        reads_before: bool = False,
    ) -> None:  # fmt: skip
        from . import kernels_attention, kernels_project, kernels_walk

        self._project, self._walk, self._attend = kernels_project, kernels_walk, kernels_attention
        self.spec, self.sizes, self.weights, self.cache, self.tiles = spec, sizes, weights, cache, tiles
        device = weights.device
        self.launchers = [Launcher(pdl, carveout=tiles.carveout) for _ in range(2)]
        self.early_sums, self.reads_before = tiles.early_sums, reads_before
        self._multiprocessors, self._bulk = multiprocessors(device), hopper(device)
        make = torch.empty
        self._qkv = make(
            tiles.slices, sizes.qkv_width, dtype=torch.float32 if tiles.slices > 1 else weights.dtype, device=device
        )
        self._squares = make(tiles.slices, dtype=torch.float32, device=device)
        self._split = make(sizes.heads, tiles.splits, sizes.head_dim, dtype=weights.dtype, device=device)
        self._lse = make(sizes.heads, tiles.splits, dtype=torch.float32, device=device)
        self._merged = make(sizes.heads * sizes.head_dim, dtype=weights.dtype, device=device)
        self._act = make(sizes.intermediate, dtype=weights.dtype, device=device)

    def embed(self, tokens: Tensor, message: Tensor) -> None:
        embed_tokens(self.sizes, self.weights.embedding, tokens, message)

    def qkv(self, step: Step, lane: Lane, absorbed: Sequence[Tensor]) -> None:
        w, t = self.weights.layers[step.layer], self.tiles
        self._norm_project(step, lane, absorbed, w.first_norm, w.qkv, self._qkv, t.qkv, slices=t.slices)

    def attend(self, step: Step, launch: Launcher) -> None:
        t = self.tiles
        self._decode_attention(launch, self.weights.layers[step.layer], step.layer)
        if t.splits > 1:
            launch(
                self._attend.merge_splits, (self.sizes.heads,), self._split, self._lse, self._merged,
                SPLITS=t.splits, SPLITS_PAD=triton.next_power_of_2(t.splits), DIM=self.sizes.head_dim, warps=4,
            )  # fmt: skip

    def output(self, step: Step, launch: Launcher, lane: Lane, message: Tensor) -> None:
        merged = self._merged if self.tiles.splits > 1 else self._split  # a single split is already the whole
        self._output(step, launch, lane, merged, self.weights.layers[step.layer].output, message, self.tiles.output, None)

    def gate_up(self, step: Step, lane: Lane, absorbed: Sequence[Tensor]) -> None:
        w, t = self.weights.layers[step.layer], self.tiles
        norm = w.first_norm if step.first_norm else w.second_norm
        self._norm_project(step, lane, absorbed, norm, w.gate_up, self._act, t.gate_up, gated=True, later=w.output)

    def down(self, step: Step, lane: Lane, message: Tensor, other: Tensor | None) -> None:
        launch, down = self.launchers[step.lane], self.weights.layers[step.layer].down
        self._output(step, launch, lane, self._act, down, message, self.tiles.down, other)

    def head(self, step: Step, lane: Lane, absorbed: Sequence[Tensor], logits: Tensor) -> None:
        self._norm_project(step, lane, absorbed, self.weights.final_norm, self.weights.head, logits, self.tiles.head)

    def _norm_project(
        self, step: Step, lane: Lane, absorbed: Sequence[Tensor], norm: Tensor, weight: Tensor, out: Tensor, tile: Tile,
        *, slices: int = 1, gated: bool = False, later: Tensor | None = None,
    ) -> None:  # fmt: skip
        """``later``: weights of which a walker may ask for some while it waits."""
        old, new = lane.advance(stores=step.stores_stream)
        deltas = [*absorbed, *[norm] * (3 - len(absorbed))]  # the unused ones are never read
        rows = weight.shape[0] // 2 if gated else weight.shape[0]
        per_program = tile.rows // 2 if gated else tile.rows
        if tile.walkers:
            blocks = triton.cdiv(rows, per_program)
            programs = walking(blocks, tile.walkers * self._multiprocessors)
            if tile.shared:
                kernel, outs, constants = self._walk.norm_walk_shared, [out], {"TILES": tile.shared}
            else:
                kernel, outs = self._walk.norm_walk, [out, paired(weight if later is None else later)]
                few, many, early = shares(blocks, programs, tile.lead)
                constants = {"FEW": few, "MANY": many, "EARLY": early, "SECOND": tile.second, "THREADS": 32 * tile.warps}
                constants["TURN"] = int(tile.turn * triton.cdiv(blocks, programs))
                constants["LATER"] = 0 if later is None or not self._bulk else tile.asked_by(programs, outs[1])
            piece = triton.next_power_of_2(triton.cdiv(self.sizes.hidden, programs))
            self.launchers[step.lane](
                kernel, (programs,), old, *deltas, new, norm, paired(weight), *outs, self.spec.norm_eps, rows,
                K=self.sizes.hidden, WIDTH=tile.block_k, PIECE=piece, ROWS=tile.rows, KEEP=step.keeps_stream,
                DELTAS=len(absorbed), STORES=step.stores_stream, GATED=gated, **constants, reads_before=not tile.shared,
                warps=tile.warps, registers=tile.registers,
            )  # fmt: skip
            return
        words, per_word = tile.words(weight)
        self.launchers[step.lane](
            self._project.norm_project, (triton.cdiv(rows, per_program), slices),
            old, *deltas, new, norm, words, out, self._squares, self.spec.norm_eps, rows,
            K=self.sizes.hidden, WORD=per_word, ROWS=tile.rows, BLOCK_K=tile.block_k, SLICES=slices, KEEP=step.keeps_stream,
            DELTAS=len(absorbed), STORES=step.stores_stream, GATED=gated, DEPTH=tile.depth, warps=tile.warps,
        )  # fmt: skip

    def _decode_attention(self, launch: Launcher, w: LayerWeights, layer: int) -> None:
        s, t, cache = self.sizes, self.tiles, self.cache
        none = self._squares
        launch(
            self._attend.decode_attention, (1, s.kv_heads, t.splits),
            self._qkv, self._squares, none if w.qkv_bias is None else w.qkv_bias, none if w.q_norm is None else w.q_norm,
            none if w.k_norm is None else w.k_norm, cache.cos, cache.sin, cache.positions, cache.keys[layer], cache.values[layer],
            self._split, self._lse, cache.max_context, s.head_dim**-0.5, self.spec.norm_eps, s.hidden,
            KV_HEADS=s.kv_heads, GROUP=s.group, GROUP_PAD=max(16, triton.next_power_of_2(s.group)), DIM=s.head_dim,
            BLOCK_T=t.block_t, SPLITS=t.splits, SLICES=t.slices, NORMED=False, BIAS=w.qkv_bias is not None, HEAD_NORM=w.q_norm is not None,
            warps=t.attention_warps,
        )  # fmt: skip

    def _output(
        self,
        step: Step,
        launch: Launcher,
        lane: Lane,
        source: Tensor,
        weight: Tensor,
        message: Tensor,
        tile: Tile,
        other: Tensor | None,
    ) -> None:
        n, k = weight.shape
        words, per_word = tile.words(weight)
        launch(
            self._project.output_project, (triton.cdiv(n, tile.rows),),
            source, words, lane.stream, message if other is None else other, message, 1.0 / self.sizes.tp, n,
            K=k, WORD=per_word, ROWS=tile.rows, BLOCK_K=tile.block_k,
            ADD_STREAM=step.adds_stream, ADD_OTHER=other is not None, DEPTH=tile.depth,
            warps=tile.warps, registers=tile.registers,
        )  # fmt: skip
