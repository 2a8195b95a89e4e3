"""Modules of a decode step for 2 to 16 sequences with products of our own in the place of cuBLAS: six kernels a layer, each able
to start before the one before it ends."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ._triton import triton
from .cache import KVCache
from .gemm_ops import GemmOps
from .gemv_ops import Launcher
from .lane import Lane
from .schedule import Step
from .spec import EngineSpec, RankSizes
from .weights import RankWeights

BATCHES = range(2, 17)
LEAST_ROWS = 16  # that tl.dot takes
MULTIPROCESSORS = 132  # of an H100 or H200


@dataclass(frozen=True)
class RowTiles:
    """One size for all products of a step, but for the rows of those with few."""

    rows: int  # at most
    block_k: int
    warps: int
    stages: int

    @classmethod
    def candidates(cls) -> list[RowTiles]:
        """Tiles of 16 to 32 KiB, several under way: what is fastest is timed at start-up."""
        return [cls(16, 512, 4, 4), cls(32, 256, 4, 4), cls(64, 128, 4, 6)]

    def rows_of(self, products: int, *, gated: bool) -> int:
        """Rows per program: gate and up share the registers, and every multiprocessor should have a program."""
        rows = self.rows // 2 if gated else self.rows
        while rows > LEAST_ROWS and products // rows < MULTIPROCESSORS:
            rows //= 2
        return max(rows, LEAST_ROWS)


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
        self._kernels, self.tiles = kernels_rows, tiles
        del self._gate_up  # here gate and up never leave their product

    def _project(self, launch: Launcher, x: Tensor, weight: Tensor, out: Tensor) -> None:
        self._launch(launch, x, weight, out)

    def _gated(self, launch: Launcher, x: Tensor, gate_up: Tensor, out: Tensor) -> None:
        self._launch(launch, x, gate_up, out, gated=True)

    def _output(self, step: Step, lane: Lane, x: Tensor, weight: Tensor, message: Tensor, other: Tensor | None) -> None:
        stream = lane.stream if step.adds_stream else None
        self._launch(self.launchers[step.lane], x, weight, message, stream=stream, other=other)

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
        n, tile = out.shape[1], self.tiles
        rows = tile.rows_of(n, gated=gated)
        launch(
            self._kernels.project_rows, (triton.cdiv(n, rows),),
            x, weight, out if stream is None else stream, out if other is None else other, out, 1.0 / self.sizes.tp,
            self.cache.batch, n, K=weight.shape[1], ROWS=rows, BLOCK_K=tile.block_k, COLUMNS=self._kernels.SEQUENCES,
            STAGES=tile.stages, GATED=gated, ADD_STREAM=stream is not None, ADD_OTHER=other is not None, warps=tile.warps,
        )  # fmt: skip
