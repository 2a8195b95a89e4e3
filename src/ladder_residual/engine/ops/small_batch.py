"""Modules of a decode step for 2 to 16 sequences with products of our own in the place of cuBLAS: six kernels a layer, each able
to start before the one before it ends."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ._triton import triton
from .cache import KVCache
from .gemm_ops import GemmOps
from .gemv_ops import Tile
from .lane import Lane
from .launcher import Launcher
from .schedule import Step
from .spec import EngineSpec, RankSizes
from .weights import RankWeights

BATCHES = range(2, 17)
FILLED = 100  # programs that, with tiles this deep, keep the memory of an H100 or H200 busy
# By rows, the fastest of a dozen shapes on an H200 (batches 4 and 12): a warp for each 16 rows, tiles deep enough that enough is
# under way. More warps than that read the same rows out of shared memory again.
SHAPES = {64: Tile(64, 256, 4, 3), 32: Tile(32, 128, 2, 8), 16: Tile(16, 128, 1, 8)}


@dataclass(frozen=True)
class RowTiles:
    """Tiles of the products; ``Tile.depth`` is the number of tiles under way."""

    rows: int  # at most, where gate and up do not share a program
    slices: int  # QKV is cut along K so that its few rows still fill the card; attention sums the slices

    @classmethod
    def candidates(cls, sizes: RankSizes) -> list[RowTiles]:
        """What is fastest depends on the shard and on what else is on the card: it is timed at start-up."""
        slices = 1
        while slices < 4 and slices * sizes.qkv_width < 16 * 2 * FILLED and sizes.hidden % (2 * slices * 128) == 0:
            slices *= 2
        made = (sizes.hidden, sizes.vocab_rows, sizes.qkv_width)  # rows of the weights that are not gated
        return [cls(rows, slices) for rows in SHAPES if rows == min(SHAPES) or max(made) // rows >= FILLED]

    def tile(self, products: int, *, gated: bool) -> Tile:
        """For a weight of ``products`` rows. Gate and up share a program's registers, so each gets the least rows."""
        fitting = [rows for rows in SHAPES if not gated and rows <= self.rows and products // rows >= FILLED]
        return SHAPES[max(fitting, default=min(SHAPES))]


class RowOps(GemmOps):
    """The same contract as ``GemmOps``, for a batch in ``BATCHES``."""

    def __init__(
        self,
        spec: EngineSpec,
        sizes: RankSizes,
        weights: RankWeights,
        cache: KVCache,
        tiles: RowTiles,
        *,
        pdl: int = 1,
        splits: int | None = None,
    ) -> None:
        from . import kernels_rows

        super().__init__(spec, sizes, weights, cache, pdl=pdl, splits=splits)
        if cache.batch not in BATCHES:
            raise ValueError(f"our own products take {BATCHES[0]} to {BATCHES[-1]} sequences, got {cache.batch}")
        if sizes.hidden % tiles.slices:
            raise ValueError(f"{tiles.slices} slices do not divide a hidden size of {sizes.hidden}")
        self._kernels, self.tiles, self.slices = kernels_rows, tiles, tiles.slices
        if self.slices > 1:
            self._qkv = torch.empty(self.slices, cache.batch, sizes.qkv_width, dtype=torch.float32, device=weights.device)
        del self._gate_up  # here gate and up never leave their product

    def _project(self, launch: Launcher, x: Tensor, weight: Tensor, out: Tensor) -> None:
        self._launch(launch, x, weight, out)

    def _gated(self, launch: Launcher, x: Tensor, gate_up: Tensor, out: Tensor) -> None:
        self._launch(launch, x, gate_up, out, gated=True)

    def _output(
        self, step: Step, launch: Launcher, lane: Lane, x: Tensor, weight: Tensor, message: Tensor, other: Tensor | None
    ) -> None:  # fmt: skip
        self._launch(launch, x, weight, message, stream=lane.stream if step.adds_stream else None, other=other)

    def _launch(
        self,
        launch: Launcher,
        x: Tensor,
        weight: Tensor,
        out: Tensor,
        *,
        gated: bool = False,
        stream: Tensor | None = None,
        other: Tensor | None = None,
    ) -> None:
        n = out.shape[-1]
        tile, slices = self.tiles.tile(n, gated=gated), out.shape[0] if out.dim() == 3 else 1
        launch(
            self._kernels.project_rows, (triton.cdiv(n, tile.rows), slices),
            x, weight, out if stream is None else stream, out if other is None else other, out, 1.0 / self.sizes.tp,
            self.cache.batch, n, K=weight.shape[1], ROWS=tile.rows, BLOCK_K=tile.block_k, COLUMNS=self._kernels.SEQUENCES,
            SLICES=slices, STAGES=tile.depth, GATED=gated, ADD_STREAM=stream is not None, ADD_OTHER=other is not None,
            warps=tile.warps,
        )  # fmt: skip
