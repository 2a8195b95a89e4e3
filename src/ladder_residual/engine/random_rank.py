"""One rank of a tensor-parallel model with random weights on this GPU, to measure and trace the engine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ..common.memory import require
from ..core.config import Wiring
from ..links import Link
from ..models.presets import ModelShape
from . import RANDOM_WEIGHTS
from .checks import check_kv_cache
from .engine import DecodeEngine
from .quantized import rounded
from .spec import EngineSpec, RankSizes
from .weights import RankWeights, random_weights, stack_weights

DTYPE = torch.bfloat16


class RandomRank:
    """Rank ``rank`` of ``tp``. Its weights are made once and shared by all engines it makes. ``groups``: two process groups of all
    ranks; without them the other ranks do not exist."""

    def __init__(
        self,
        name: str,
        shape: ModelShape,
        tp: int,
        *,
        layers: int | None = None,
        rank: int = 0,
        groups: tuple[Any, Any] | None = None,
        weights: str = "bf16",
        kv_cache_dtype: str = "auto",
    ) -> None:
        """``weights``: a name in ``RANDOM_WEIGHTS``; the projections of the layers are rounded to it."""
        shape = shape if layers is None else replace(shape, num_layers=layers)
        self.name, self.tp, self.groups = name, tp, groups
        self.weights_name = "random" if weights == "bf16" else f"random, {weights}"
        self.spec = EngineSpec.from_shape(shape)
        self.sizes = RankSizes.of(shape, tp, rank)
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.kv_cache_dtype = kv_cache_dtype
        check_kv_cache(kv_cache_dtype, self.device)
        rounding = RANDOM_WEIGHTS[weights]
        widths = (self.sizes.hidden, self.sizes.heads * self.sizes.head_dim, self.sizes.intermediate)
        if rounding and rounding[1] and (odd := [width for width in widths if width % rounding[1]]):
            raise ValueError(
                f"--weights {weights} has groups of {rounding[1]} columns, and a rank of {name} at tp={tp} has projections of "
                f"{odd[0]}: use --weights fp8, or another --tp"
            )
        need = self.sizes.resident_bytes(DTYPE.itemsize, tied=shape.tied_embeddings)
        need += need // 2 if rounding else 0  # the rounded layers are made beside the others
        require(need, self.device, f"a rank of {name} at tp={tp}", "raise tp or use fewer layers")
        made = random_weights(self.spec, tp, rank, DTYPE, self.device)
        self.weights: RankWeights = stack_weights(self.spec, self.sizes, made, release=True)
        if rounding:
            self.weights = self.weights.with_projections(lambda weight: rounded(weight, *rounding))

    def engine(self, wiring: str, link: Link | None = None, *, reducer: str | None = None, **options: Any) -> DecodeEngine:
        """``options`` are ``DecodeEngine``'s. With a ``link`` every all-reduce is emulated and lasts as long as it says; otherwise
        ``reducer`` reduces over the ranks of ``groups``."""
        kind = reducer or ("emulated" if self.tp > 1 else "none")
        wired = Wiring.parse(wiring, self.spec.shape.num_layers)
        options = {"kv_cache_dtype": self.kv_cache_dtype, **options}
        where: dict[str, Any] = {"tp": self.tp, "rank": self.sizes.rank, "reducer": kind, "link": link}
        return DecodeEngine(self.spec, wired, self.weights, **where, groups=self.groups if reducer else None, **options)

    def bytes_per_step(self, batch: int, context: int) -> int:
        """What one step must read: the weights once, and every sequence's keys and values."""
        return self.weights.nbytes_per_step + self.sizes.cache_bytes(DTYPE.itemsize, batch, context, self.kv_cache_dtype)
