"""Modules of a decode step for one token: five kernels a layer (QKV, attention, output, gate/up, down), all Triton."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..cache import KVCache
from ..cuda.device import is_hopper, sm_count
from ..cuda.launcher import Launcher
from ..cuda.pdl import PdlMode
from ..quantized import Weight
from ..residual_stream import ResidualStream
from ..schedule import Step
from ..spec import EngineSpec, RankSizes
from ..weights import RankWeights
from .tiles import GemvTiles, Tile, block_counts, ceil_div, next_power_of_2, packed, persistent_programs


def embed_tokens(sizes: RankSizes, table: Tensor, tokens: Tensor, partial: Tensor) -> None:
    """The first kernel of a step: an ordinary launch, so that everything after it may rely on the previous step being complete."""
    from ..kernels.elementwise import embed

    grid = (tokens.numel(), ceil_div(sizes.hidden, 1024))
    embed[grid](tokens, table, partial, sizes.vocab_first, sizes.vocab_rows, sizes.hidden, BLOCK=1024, num_warps=4)


class GemvOps:
    """Batch 1. Each module writes its partial into the buffer it is given."""

    def __init__(
        self, spec: EngineSpec, sizes: RankSizes, weights: RankWeights, cache: KVCache, tiles: GemvTiles, *,
        pdl: PdlMode = PdlMode.TRIGGER_THEN_WAIT, reads_before_wait: bool = False,
    ) -> None:  # fmt: skip
        from ..kernels import attention, gemv, persistent_gemv

        self._attention, self._gemv, self._persistent = attention, gemv, persistent_gemv
        self.spec, self.sizes, self.weights, self.cache, self.tiles = spec, sizes, weights, cache, tiles
        device, dtype = weights.device, weights.dtype
        self.launchers = [Launcher(pdl, smem_carveout=tiles.smem_carveout) for _ in range(2)]
        self.pdl_all_reduce, self.reads_before_wait = tiles.pdl_all_reduce, reads_before_wait
        self._sm_count, self._has_bulk_prefetch = sm_count(device), is_hopper(device)

        def make(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.empty(*shape, dtype=dtype, device=device)

        self._qkv = make(tiles.split_k, sizes.qkv_width, dtype=torch.float32 if tiles.split_k > 1 else dtype)
        self._squares = make(tiles.split_k, dtype=torch.float32)
        self._split = make(sizes.heads, tiles.kv_splits, sizes.head_dim)
        self._lse = make(sizes.heads, tiles.kv_splits, dtype=torch.float32)
        self._merged = make(sizes.heads * sizes.head_dim)
        self._act = make(sizes.intermediate)

    def embed(self, tokens: Tensor, partial: Tensor) -> None:
        embed_tokens(self.sizes, self.weights.embedding, tokens, partial)

    def qkv(self, step: Step, stream: ResidualStream, added: Sequence[Tensor]) -> None:
        w, t = self.weights.layers[step.layer], self.tiles
        self._norm_gemv(step, stream, added, w.input_norm, w.qkv, self._qkv, t.qkv, split_k=t.split_k)

    def attend(self, step: Step, launch: Launcher) -> None:
        s, t, w, cache = self.sizes, self.tiles, self.weights.layers[step.layer], self.cache
        none = self._squares  # never read
        launch(
            self._attention.decode_attention, (1, s.kv_heads, t.kv_splits),
            self._qkv, self._squares, none if w.qkv_bias is None else w.qkv_bias, none if w.q_norm is None else w.q_norm,
            none if w.k_norm is None else w.k_norm, cache.cos, cache.sin, cache.positions, *cache.layer(step.layer),
            self._split, self._lse, cache.max_context, s.head_dim**-0.5, self.spec.norm_eps, s.hidden,
            KV_HEADS=s.kv_heads, GROUP=s.group, GROUP_PAD=max(16, next_power_of_2(s.group)), DIM=s.head_dim, BLOCK_KV=t.block_kv,
            KV_SPLITS=t.kv_splits, SPLIT_K=t.split_k, NORMED=False, BIAS=w.qkv_bias is not None, HEAD_NORM=w.q_norm is not None,
            num_warps=t.attention_warps,
        )  # fmt: skip
        if t.kv_splits > 1:
            launch(
                self._attention.merge_splits, (s.heads,), self._split, self._lse, self._merged,
                KV_SPLITS=t.kv_splits, KV_SPLITS_PAD=next_power_of_2(t.kv_splits), DIM=s.head_dim, num_warps=4,
            )  # fmt: skip

    def out_proj(self, step: Step, launch: Launcher, stream: ResidualStream, partial: Tensor) -> None:
        attended = self._merged if self.tiles.kv_splits > 1 else self._split  # a single split is the whole
        weight = self.weights.layers[step.layer].output
        self._project(step, launch, stream, attended, weight, partial, self.tiles.output, None)

    def gate_up(self, step: Step, stream: ResidualStream, added: Sequence[Tensor]) -> None:
        w, t = self.weights.layers[step.layer], self.tiles
        norm = w.input_norm if step.uses_input_norm else w.post_attention_norm
        self._norm_gemv(step, stream, added, norm, w.gate_up, self._act, t.gate_up, gated=True, l2_weight=w.output)

    def down(self, step: Step, stream: ResidualStream, partial: Tensor, attention_partial: Tensor | None) -> None:
        launch, weight = self.launchers[step.chain], self.weights.layers[step.layer].down
        self._project(step, launch, stream, self._act, weight, partial, self.tiles.down, attention_partial)

    def head(self, step: Step, stream: ResidualStream, added: Sequence[Tensor], logits: Tensor) -> None:
        self._norm_gemv(step, stream, added, self.weights.final_norm, self.weights.head, logits, self.tiles.head)

    def _norm_gemv(
        self, step: Step, stream: ResidualStream, added: Sequence[Tensor], norm: Tensor, weight: Weight, out: Tensor, tile: Tile,
        *, split_k: int = 1, gated: bool = False, l2_weight: Any = None,
    ) -> None:  # fmt: skip
        """``l2_weight``: weights of a later kernel that a persistent one may prefetch into L2 while it waits."""
        old, new = stream.advance(stores=step.stores_stream)
        inputs = (old, *added, *[norm] * (3 - len(added)), new, norm)  # the unused outputs are never read
        rows = weight.shape[0] // 2 if gated else weight.shape[0]
        blocks = ceil_div(rows, tile.rows // 2 if gated else tile.rows)
        shared: dict[str, Any] = dict(
            K=self.sizes.hidden, ROWS=tile.rows, KEEP_STREAM=step.keeps_stream, NUM_ADDS=len(added),
            STORE_STREAM=step.stores_stream, GATED=gated, num_warps=tile.num_warps,
        )  # fmt: skip
        launch = self.launchers[step.chain]
        if not tile.programs_per_sm:
            (view, *scaling), constants = tile.weight_view(weight)
            launch(
                self._gemv.norm_gemv, (blocks, split_k), *inputs, view, out, self._squares, *scaling, self.spec.norm_eps, rows,
                **constants, BLOCK_K=tile.block_k, SPLIT_K=split_k, PREFETCH=tile.num_stages, **shared,
            )  # fmt: skip
            return
        assert isinstance(weight, Tensor)
        programs = persistent_programs(blocks, tile.programs_per_sm * self._sm_count)
        shared |= dict(
            WIDTH=tile.block_k, STORE_WIDTH=next_power_of_2(ceil_div(self.sizes.hidden, programs)),
            max_registers=tile.max_registers,
        )  # fmt: skip
        if tile.smem_tiles:
            launch(
                self._persistent.persistent_norm_gemv_smem, (programs,), *inputs, packed(weight), out, self.spec.norm_eps, rows,
                SMEM_TILES=tile.smem_tiles, **shared,
            )  # fmt: skip
            return
        l2_pairs = packed(weight if l2_weight is None else l2_weight)
        prefetches = l2_weight is not None and self._has_bulk_prefetch
        launch(
            self._persistent.persistent_norm_gemv, (programs,), *inputs, packed(weight), out, l2_pairs, self.spec.norm_eps, rows,
            *block_counts(blocks, programs, tile.tail_share), PREFETCH_SECOND=tile.prefetch_second, THREADS=32 * tile.num_warps,
            TRIGGER_AT=int(tile.trigger_after * ceil_div(blocks, programs)),
            L2_PREFETCH=tile.l2_prefetch(programs, l2_pairs) if prefetches else 0, can_read_before_wait=True, **shared,
        )  # fmt: skip

    def _project(
        self, step: Step, launch: Launcher, stream: ResidualStream, x: Tensor, weight: Weight, partial: Tensor, tile: Tile,
        attention_partial: Tensor | None,
    ) -> None:  # fmt: skip
        n, k = weight.shape
        (view, *scaling), constants = tile.weight_view(weight)
        launch(
            self._gemv.gemv, (ceil_div(n, tile.rows),), x, view, stream.current,
            partial if attention_partial is None else attention_partial, partial, *scaling, 1.0 / self.sizes.tp, n,
            K=k, **constants, ROWS=tile.rows, BLOCK_K=tile.block_k, ADD_STREAM=step.partial_adds_stream,
            ADD_PARTIAL=attention_partial is not None, PREFETCH=tile.num_stages, num_warps=tile.num_warps,
            max_registers=tile.max_registers,
        )  # fmt: skip
