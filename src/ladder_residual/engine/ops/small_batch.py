"""Modules of a decode step for 2 to 16 sequences with Triton GEMMs in the place of cuBLAS: six kernels a layer, each able to start before
the one before it ends."""

from __future__ import annotations

import torch
from torch import Tensor

from ..cache import KVCache
from ..cuda.launcher import Launcher
from ..cuda.pdl import PdlMode
from ..quantized import Weight
from ..residual_stream import ResidualStream
from ..schedule import Step
from ..spec import EngineSpec, RankSizes
from ..weights import RankWeights
from .gemm import GemmOps
from .tiles import SmallBatchTiles, ceil_div

BATCHES = range(2, 17)


class SmallBatchOps(GemmOps):
    """As ``GemmOps``, for a batch in ``BATCHES``."""

    def __init__(
        self, spec: EngineSpec, sizes: RankSizes, weights: RankWeights, cache: KVCache, tiles: SmallBatchTiles, *,
        pdl: PdlMode = PdlMode.TRIGGER_THEN_WAIT, kv_splits: int | None = None,
    ) -> None:  # fmt: skip
        from ..kernels import small_batch

        super().__init__(spec, sizes, weights, cache, pdl=pdl, kv_splits=kv_splits)
        if cache.batch not in BATCHES:
            raise ValueError(f"the Triton GEMM takes {BATCHES[0]} to {BATCHES[-1]} sequences, got {cache.batch}")
        if sizes.hidden % tiles.split_k:
            raise ValueError(f"split_k={tiles.split_k} does not divide a hidden size of {sizes.hidden}")
        self._kernels, self.tiles, self.split_k = small_batch, tiles, tiles.split_k
        if self.split_k > 1:
            self._qkv = torch.empty(self.split_k, cache.batch, sizes.qkv_width, dtype=torch.float32, device=weights.device)
        del self._gate_up  # gate and up never leave their kernel

    def _project(self, launch: Launcher, x: Tensor, weight: Weight, out: Tensor) -> None:
        self._launch(launch, x, weight, out)

    def _gated(self, launch: Launcher, x: Tensor, gate_up: Weight, out: Tensor) -> None:
        self._launch(launch, x, gate_up, out, gated=True)

    def _write_partial(
        self, step: Step, launch: Launcher, stream: ResidualStream, x: Tensor, weight: Weight, partial: Tensor,
        attention_partial: Tensor | None,
    ) -> None:  # fmt: skip
        add_stream = stream.current if step.partial_adds_stream else None
        self._launch(launch, x, weight, partial, add_stream=add_stream, add_partial=attention_partial)

    def _launch(
        self, launch: Launcher, x: Tensor, weight: Weight, out: Tensor, *, gated: bool = False,
        add_stream: Tensor | None = None, add_partial: Tensor | None = None,
    ) -> None:  # fmt: skip
        n = out.shape[-1]
        tile, split_k = self.tiles.tile(n, gated=gated), out.shape[0] if out.dim() == 3 else 1
        (view, *scaling), constants = tile.weight_view(weight)
        # int4: twice the columns, so that as many bytes are in flight
        block_k = tile.block_k if gated or constants["PACK"] < 8 else 2 * tile.block_k
        launch(
            self._kernels.small_batch_gemm, (ceil_div(n, tile.rows), split_k),
            x, view, out if add_stream is None else add_stream, out if add_partial is None else add_partial, out, *scaling,
            1.0 / self.sizes.tp, self.cache.batch, n,
            K=weight.shape[1], ROWS=tile.rows, BLOCK_K=block_k, COLUMNS=self._kernels.MIN_COLUMNS, SPLIT_K=split_k,
            NUM_STAGES=tile.num_stages, GATED=gated, ADD_STREAM=add_stream is not None, ADD_PARTIAL=add_partial is not None,
            **constants, num_warps=tile.num_warps,
        )  # fmt: skip
