"""The static KV cache: fixed addresses, so that a captured graph stays valid; lengths live on the device."""

from __future__ import annotations

import torch
from torch import Tensor

from .rope import rope_tables
from .spec import EngineSpec, RankSizes


class KVCache:
    """Keys and values (layers, B, kv_heads, max_context, head_dim); ``positions`` (B) says where each next token goes."""

    def __init__(
        self, spec: EngineSpec, sizes: RankSizes, batch: int, max_context: int, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        shape = (sizes.layers, batch, sizes.kv_heads, max_context, sizes.head_dim)
        # NaN, not zeros: a kernel that reads past a sequence's length must not pass its tests
        self.keys = torch.full(shape, float("nan"), dtype=dtype, device=device)
        self.values = torch.full(shape, float("nan"), dtype=dtype, device=device)
        self.positions = torch.zeros(batch, dtype=torch.int32, device=device)
        self.cos, self.sin = rope_tables(spec, max_context, device)
        self.batch, self.max_context = batch, max_context

    def set_lengths(self, lengths: Tensor) -> None:
        self.positions.copy_(lengths.to(torch.int32))

    def fill(self, length: int, *, seed: int = 0) -> None:
        """Random keys and values for ``length`` positions: a context for benchmarks without a prefill."""
        generator = torch.Generator(device=self.keys.device).manual_seed(seed)
        for cache in (self.keys, self.values):
            for layer in range(cache.shape[0]):
                cache[layer, :, :, :length].normal_(generator=generator)
        self.positions.fill_(length)
