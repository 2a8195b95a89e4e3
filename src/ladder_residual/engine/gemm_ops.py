"""Modules of a decode step for several sequences: small kernels between projections by cuBLAS or, up to 16 sequences, by a kernel
that streams the weights (``kernels_batch.py``). Which of the two is faster depends on the shard: the engine times both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ._triton import triton
from .cache import KVCache
from .gemv_ops import Launcher, embed_tokens, pick_splits
from .lane import Lane
from .schedule import Step
from .spec import EngineSpec, RankSizes
from .weights import RankWeights


@dataclass(frozen=True)
class BatchTile:
    rows: int  # rows of W per program; gate and up count once
    block_k: int
    warps: int
    stages: int  # tiles in flight


@dataclass(frozen=True)
class BatchTiles:
    """Tile sizes of one shard for ``batch_project``."""

    qkv: BatchTile
    output: BatchTile
    gate_up: BatchTile
    down: BatchTile
    head: BatchTile

    @classmethod
    def candidates(cls, batch: int) -> list[BatchTiles]:
        """Sets worth timing on a Hopper card; none where the batch is larger than a tensor-core tile."""
        if batch > 16:
            return []
        narrow, wide = BatchTile(16, 256, 4, 4), BatchTile(32, 256, 4, 4)
        return [cls(narrow, wide, narrow, wide, wide), cls(narrow, wide, wide, wide, wide)]


class GemmOps:
    """Any batch. The same contract as ``GemvOps``: absorb, compute, write the message."""

    def __init__(
        self,
        spec: EngineSpec,
        sizes: RankSizes,
        weights: RankWeights,
        cache: KVCache,
        *,
        tiles: BatchTiles | None = None,  # None: cuBLAS
        pdl: int = 1,
        splits: int | None = None,
    ) -> None:
        from . import kernels_attention, kernels_batch, kernels_small

        self._attend, self._small, self._batch, self.tiles = kernels_attention, kernels_small, kernels_batch, tiles
        self.spec, self.sizes, self.weights, self.cache = spec, sizes, weights, cache
        self.splits = splits or pick_splits(sizes, cache.max_context, cache.batch)
        b, device, dtype = cache.batch, weights.device, weights.dtype
        self.launchers = [Launcher(pdl), Launcher(pdl)]

        def make(*shape: int, kind: torch.dtype = dtype) -> Tensor:
            return torch.empty(*shape, dtype=kind, device=device)

        # one set per lane: in two lanes attention and MLP run at the same time
        self._normed = [make(b, sizes.hidden) for _ in range(2)]
        self._qkv = make(b, sizes.qkv_width)
        self._split = make(b, sizes.heads, self.splits, sizes.head_dim)
        self._lse = make(b, sizes.heads, self.splits, kind=torch.float32)
        self._merged = make(b, sizes.heads * sizes.head_dim)
        self._gate_up = make(b, 2 * sizes.intermediate)
        self._act = make(b, sizes.intermediate)

    def embed(self, tokens: Tensor, message: Tensor) -> None:
        embed_tokens(self.sizes, self.weights.embedding, tokens, message)

    def attention(self, step: Step, lane: Lane, absorbed: Sequence[Tensor], message: Tensor, other: Tensor | None) -> None:
        s, w, launch, cache = self.sizes, self.weights.layers[step.layer], self.launchers[step.lane], self.cache
        normed = self._absorb_norm(step, lane, absorbed, w.first_norm)
        self._matmul(launch, normed, w.qkv, self._qkv, self._tile("qkv"))
        none = self._lse
        launch(
            self._attend.decode_attention, (cache.batch, s.kv_heads, self.splits),
            self._qkv, none, none if w.qkv_bias is None else w.qkv_bias, none if w.q_norm is None else w.q_norm,
            none if w.k_norm is None else w.k_norm, cache.cos, cache.sin, cache.positions, cache.keys[step.layer],
            cache.values[step.layer], self._split, self._lse, cache.max_context, s.head_dim**-0.5, self.spec.norm_eps, s.hidden,
            KV_HEADS=s.kv_heads, GROUP=s.group, GROUP_PAD=max(16, triton.next_power_of_2(s.group)), DIM=s.head_dim, BLOCK_T=64,
            SPLITS=self.splits, SLICES=1, BIAS=w.qkv_bias is not None, HEAD_NORM=w.q_norm is not None, warps=4,
        )  # fmt: skip
        merged = self._split.view(self._merged.shape) if self.splits == 1 else self._merged
        if self.splits > 1:
            launch(
                self._attend.merge_splits, (cache.batch * s.heads,), self._split, self._lse, merged, SPLITS=self.splits,
                SPLITS_PAD=triton.next_power_of_2(self.splits), DIM=s.head_dim, warps=1 if self.splits <= 8 else 4,
            )  # fmt: skip
        self._output(step, lane, merged, w.output, message, self._tile("output"), other)

    def mlp(self, step: Step, lane: Lane, absorbed: Sequence[Tensor], message: Tensor, other: Tensor | None) -> None:
        w, launch = self.weights.layers[step.layer], self.launchers[step.lane]
        normed = self._absorb_norm(step, lane, absorbed, w.first_norm if step.first_norm else w.second_norm)
        ff = self.sizes.intermediate
        if self.tiles is not None:
            self._project(launch, normed, w.gate_up, self._act, self.tiles.gate_up, gated=True)
        else:
            self._matmul(launch, normed, w.gate_up, self._gate_up)
            launch(
                self._small.silu_multiply, (self.cache.batch, triton.cdiv(ff, 1024)), self._gate_up, self._act, ff, BLOCK=1024, warps=4
            )  # fmt: skip
        self._output(step, lane, self._act, w.down, message, self._tile("down"), other)

    def head(self, step: Step, lane: Lane, absorbed: Sequence[Tensor], logits: Tensor) -> None:
        normed = self._absorb_norm(step, lane, absorbed, self.weights.final_norm)
        self._matmul(self.launchers[step.lane], normed, self.weights.head, logits, self._tile("head"))

    def _absorb_norm(self, step: Step, lane: Lane, absorbed: Sequence[Tensor], norm: Tensor) -> Tensor:
        out = self._normed[step.lane]
        k = self.sizes.hidden
        old, new = lane.advance() if absorbed else (lane.stream, lane.stream)
        deltas = [*absorbed, *[norm] * (3 - len(absorbed))]
        self.launchers[step.lane](
            self._small.absorb_norm, (self.cache.batch,), old, *deltas, new, norm, out, self.spec.norm_eps,
            K=k, BLOCK_K=triton.next_power_of_2(k), KEEP=step.keeps_stream, DELTAS=len(absorbed), warps=8,
        )  # fmt: skip
        return out

    def _tile(self, name: str) -> BatchTile | None:
        return getattr(self.tiles, name, None)

    def _matmul(self, launch: Launcher, x: Tensor, weight: Tensor, out: Tensor, tile: BatchTile | None = None) -> None:
        if tile is not None:
            self._project(launch, x, weight, out, tile)
            return
        torch.mm(x, weight.T, out=out)
        launch.dependent = False  # cuBLAS does not signal early: what follows is an ordinary launch

    def _output(
        self, step: Step, lane: Lane, x: Tensor, weight: Tensor, message: Tensor, tile: BatchTile | None, other: Tensor | None
    ) -> None:
        launch = self.launchers[step.lane]
        if tile is not None:
            self._project(launch, x, weight, message, tile, stream=lane.stream if step.adds_stream else None, other=other)
            return
        self._matmul(launch, x, weight, message)
        if step.adds_stream:
            message.add_(lane.stream, alpha=1.0 / self.sizes.tp)
        if other is not None:
            message.add_(other)

    def _project(
        self, launch: Launcher, x: Tensor, weight: Tensor, out: Tensor, tile: BatchTile, *, gated: bool = False,
        stream: Tensor | None = None, other: Tensor | None = None,
    ) -> None:  # fmt: skip
        n, k = weight.shape[0] // (2 if gated else 1), weight.shape[1]
        launch(
            self._batch.batch_project, (triton.cdiv(n, tile.rows),),
            x, weight, out if stream is None else stream, out if other is None else other, out, 1.0 / self.sizes.tp, x.shape[0], n,
            K=k, ROWS=tile.rows, BLOCK_K=tile.block_k, STAGES=tile.stages, BATCH=self._batch.MAX_BATCH, GATED=gated,
            ADD_STREAM=stream is not None, ADD_OTHER=other is not None, warps=tile.warps,
        )  # fmt: skip
