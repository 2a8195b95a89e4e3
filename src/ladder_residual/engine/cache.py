"""The static KV cache: fixed addresses, so that a captured graph stays valid; lengths live on the device."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from .rope import rope_tables
from .spec import EngineSpec, RankSizes

FP8 = torch.float8_e4m3fn


def to_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Keys or values (..., head_dim) in E4M3, and their scales (...). Unscaled, as vLLM starts, keys beyond 448 are cut off and values
    below 0.002 vanish. A scale for each token and head needs no calibration; as a power of two it rounds nothing by itself."""
    top = x.float().abs().amax(-1).clamp(min=2.0**-100)
    scales = (top.view(torch.int32) & 0x7F800000).view(torch.float32) * 2.0**-7  # the largest number becomes 128 to 256
    return (x / scales.unsqueeze(-1)).to(FP8), scales.bfloat16()


class KVCache:
    """Keys and values (layers, B, kv_heads, max_context, head_dim); ``positions`` (B) says where each next token goes. ``kind`` is a name
    in ``KV_CACHE_DTYPES``: with fp8 every key and value has a scale (layers, B, kv_heads, max_context)."""

    def __init__(
        self, spec: EngineSpec, sizes: RankSizes, batch: int, max_context: int, dtype: torch.dtype, device: torch.device | str,
        kind: str = "auto",
    ) -> None:  # fmt: skip
        shape = (sizes.layers, batch, sizes.kv_heads, max_context, sizes.head_dim)
        # NaN, not zeros: a kernel that reads past a sequence's length must not pass its tests
        poison = partial(torch.full, fill_value=float("nan"), device=device)
        self.keys, self.values = (poison(shape, dtype=FP8 if kind == "fp8" else dtype) for _ in range(2))
        # of keys, of values
        self.scales = [poison(shape[:-1], dtype=torch.bfloat16) for _ in range(2)] if kind == "fp8" else []
        self.kind = kind
        self.positions = torch.zeros(batch, dtype=torch.int32, device=device)
        self.cos, self.sin = rope_tables(spec, max_context, device)
        self.batch, self.max_context = batch, max_context

    def layer(self, index: int) -> tuple[Tensor | None, ...]:
        """What kernels take: keys, values, and the scales of both or None."""
        scales: list[Tensor | None] = [held[index] for held in self.scales] or [None, None]
        return self.keys[index], self.values[index], *scales

    def store(self, layer: int, keys: Tensor, values: Tensor) -> list[Tensor]:
        """Of prompts (B, kv_heads, length, head_dim), from the first position on. Returns both as decode steps will read them."""
        here, found = (layer, slice(None), slice(None), slice(keys.shape[2])), []
        for index, (cache, new) in enumerate(((self.keys, keys), (self.values, values))):
            if self.scales:
                cache[here], self.scales[index][here] = to_fp8(new)
                new = (cache[here].float() * self.scales[index][here].unsqueeze(-1)).to(new.dtype)
            else:
                cache[here] = new
            found.append(new)
        return found

    def set_lengths(self, lengths: Tensor) -> None:
        self.positions.copy_(lengths.to(torch.int32))

    def fill(self, length: int, *, seed: int = 0) -> None:
        """Random keys and values for ``length`` positions: a context for benchmarks without a prefill."""
        generator = torch.Generator(device=self.keys.device).manual_seed(seed)
        for cache in (self.keys, self.values):
            for layer in cache:  # the same numbers for all sequences: half of the GPU's memory may be this cache
                shape = (layer.shape[1], length, layer.shape[3])
                layer[:, :, :length] = torch.randn(shape, generator=generator, device=layer.device)
        for scales in self.scales:
            scales[..., :length] = 1
        self.positions.fill_(length)
