"""One rank of a tensor-parallel model with random weights on this GPU, to measure and trace the engine."""

from __future__ import annotations

from dataclasses import replace

import torch

from ..core.config import Wiring
from ..links import Link
from ..models.presets import ModelShape
from .cache import KVCache
from .cuda.pdl import PdlMode
from .engine import DecodeEngine
from .ops.tiles import GemvTiles
from .spec import EngineSpec, RankSizes
from .weights import RankWeights, random_weights, stack_weights

DTYPE = torch.bfloat16


class RandomRank:
    """Rank 0 of ``tp``. Its weights are made once and shared by all engines it makes."""

    def __init__(self, name: str, shape: ModelShape, tp: int, *, layers: int | None = None) -> None:
        shape = shape if layers is None else replace(shape, num_layers=layers)
        self.name, self.tp = name, tp
        self.spec = EngineSpec.from_shape(shape)
        self.sizes = RankSizes.of(shape, tp, 0)
        need = self.sizes.resident_bytes(DTYPE.itemsize, tied=shape.tied_embeddings)
        free, _ = torch.cuda.mem_get_info()
        if need > free:
            raise ValueError(f"a rank of {name} at tp={tp} needs {need / 1e9:.1f} GB, {free / 1e9:.1f} GB are free: raise tp")
        made = random_weights(self.spec, tp, 0, DTYPE, "cuda")
        self.weights: RankWeights = stack_weights(self.spec, self.sizes, made, release=True)

    def engine(
        self,
        wiring: str,
        link: Link,
        *,
        batch: int,
        max_context: int,
        schedule: str = "auto",
        gemm_backend: str = "auto",
        pdl: int = PdlMode.TRIGGER_THEN_WAIT,
        tiles: GemvTiles | None = None,
        cache: KVCache | None = None,
    ) -> DecodeEngine:
        """With tp > 1 every all-reduce is emulated: it lasts as long as ``link`` says."""
        return DecodeEngine(
            self.spec,
            Wiring.parse(wiring, self.spec.shape.num_layers),
            self.weights,
            tp=self.tp,
            reducer="emulated" if self.tp > 1 else "none",
            link=link,
            batch=batch,
            max_context=max_context,
            schedule=schedule,
            gemm_backend=gemm_backend,
            pdl=pdl,
            tiles=tiles,
            cache=cache,
        )

    def bytes_per_step(self, batch: int, context: int) -> int:
        """What one step must read: the weights once, and every sequence's keys and values."""
        return self.sizes.weight_bytes(DTYPE.itemsize) + self.sizes.cache_bytes(DTYPE.itemsize, batch, context)
