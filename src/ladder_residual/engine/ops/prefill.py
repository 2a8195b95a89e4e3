"""Modules for prompts: cuBLAS and fused attention, because prefill is bound by arithmetic.

``PrefillOps`` is plain PyTorch. On a GPU ``FusedPrefillOps`` takes its place: three kernels between the GEMMs instead of some twenty
operations a layer, which the host could not launch fast enough to keep the GPU busy.

Prompts are padded on the right: under a causal mask a pad never changes an earlier token, and decode overwrites its cache entry.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..cache import KVCache
from ..cuda.launcher import Launcher
from ..cuda.pdl import PdlMode
from ..quantized import Weight, dense
from ..residual_stream import ResidualStream
from ..rope import rotate
from ..schedule import Step
from ..spec import EngineSpec, RankSizes
from ..weights import RankWeights
from .gemm import add_rms_norm, add_to_partial, silu_and_mul
from .tiles import next_power_of_2


class PrefillOps:
    """Rows of the residual stream are (sequence, position) pairs."""

    launchers: Sequence[object] = ()
    pdl_all_reduce = reads_before_wait = False

    def __init__(self, spec: EngineSpec, sizes: RankSizes, weights: RankWeights, cache: KVCache, length: int) -> None:
        self.spec, self.sizes, self.weights, self.cache, self.length = spec, sizes, weights, cache, length
        self.last: Tensor | None = None  # rows to give logits for: each prompt's last token
        self._made: dict[str, Tensor] = {}  # between the parts of a module; freed by the part that reads it

    def embed(self, tokens: Tensor, partial: Tensor) -> None:
        local = tokens.reshape(-1) - self.sizes.vocab_first
        mine = (local >= 0) & (local < self.sizes.vocab_rows)
        partial.copy_(self.weights.embedding[local.clamp(0, self.sizes.vocab_rows - 1)] * mine.unsqueeze(-1))

    def qkv(self, step: Step, stream: ResidualStream, added: Sequence[Tensor]) -> None:
        w = self.weights.layers[step.layer]
        self._made["qkv"] = F.linear(self._add_norm(step, stream, added, w.input_norm), self._dense(w.qkv))

    def attend(self, step: Step, launch: Launcher) -> None:
        q, k, v = self._rotate_and_store(self._made.pop("qkv"), step.layer)
        self._made["attended"] = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.sizes.group > 1)

    def out_proj(self, step: Step, launch: Launcher, stream: ResidualStream, partial: Tensor) -> None:
        attended = self._made.pop("attended").transpose(1, 2).reshape(partial.shape[0], -1)
        self._write_partial(step, stream, attended, self.weights.layers[step.layer].output, partial, None)

    def gate_up(self, step: Step, stream: ResidualStream, added: Sequence[Tensor]) -> None:
        w = self.weights.layers[step.layer]
        normed = self._add_norm(step, stream, added, w.input_norm if step.uses_input_norm else w.post_attention_norm)
        self._made["act"] = self._gated(F.linear(normed, self._dense(w.gate_up)))

    def down(self, step: Step, stream: ResidualStream, partial: Tensor, attention_partial: Tensor | None) -> None:
        self._write_partial(
            step, stream, self._made.pop("act"), self.weights.layers[step.layer].down, partial, attention_partial
        )

    def head(self, step: Step, stream: ResidualStream, added: Sequence[Tensor], logits: Tensor) -> None:
        normed = self._add_norm(step, stream, added, self.weights.final_norm)
        rows = normed if self.last is None else normed[self.last]
        torch.mm(rows, self._dense(self.weights.head).T, out=logits)

    def _dense(self, weight: Weight) -> Tensor:
        return weight if isinstance(weight, Tensor) else weight.float().to(self.weights.dtype)

    def _rotate_and_store(self, qkv: Tensor, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        """Queries (B, heads, S, D), rotated, and the keys and values as the cache holds them now."""
        s, cache, length, w = self.sizes, self.cache, self.length, self.weights.layers[layer]
        if w.qkv_bias is not None:
            qkv = qkv + w.qkv_bias
        heads = qkv.view(cache.batch, length, -1, s.head_dim).transpose(1, 2)
        q, k, v = heads.split([s.heads, s.kv_heads, s.kv_heads], dim=1)
        if w.q_norm is not None and w.k_norm is not None:
            q, k = self._rms(q.float(), w.q_norm), self._rms(k.float(), w.k_norm)
        cos, sin = cache.cos[:length], cache.sin[:length]
        k, v = cache.store(layer, rotate(k.float(), cos, sin).to(v.dtype), v)
        return rotate(q.float(), cos, sin).to(v.dtype), k, v

    def _gated(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

    def _add_norm(self, step: Step, stream: ResidualStream, added: Sequence[Tensor], norm: Tensor) -> Tensor:
        old, new = stream.advance(stores=step.stores_stream)
        if added:
            if not step.stores_stream:
                new = torch.empty_like(old)
            if step.keeps_stream:
                torch.add(old, added[0], out=new)
            else:
                new.copy_(added[0])
            for output in added[1:]:
                new.add_(output)
        return self._rms(new, norm).to(self.weights.dtype)

    def _rms(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight.float(), self.spec.norm_eps)

    def _write_partial(
        self, step: Step, stream: ResidualStream, x: Tensor, weight: Weight, partial: Tensor, attention_partial: Tensor | None
    ) -> None:  # fmt: skip
        torch.mm(x, self._dense(weight).T, out=partial)
        add_to_partial(step, stream, partial, attention_partial, self.sizes.tp)


class FusedPrefillOps(PrefillOps):
    def __init__(self, spec: EngineSpec, sizes: RankSizes, weights: RankWeights, cache: KVCache, length: int) -> None:
        from ..kernels import prefill

        super().__init__(spec, sizes, weights, cache, length)
        self._kernels, self._launch = prefill, Launcher(PdlMode.OFF)

    def _dense(self, weight: Weight) -> Tensor:
        return dense(weight, self.weights.dtype)

    def _rotate_and_store(self, qkv: Tensor, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        s, cache, w = self.sizes, self.cache, self.weights.layers[layer]
        held: Any = qkv.new_empty(2, cache.batch, self.length, s.kv_heads, s.head_dim) if cache.scales else (None, None)
        # laid out as attention's output will be, so that this needs no copy either
        q = qkv.new_empty(cache.batch, self.length, s.heads, s.head_dim)
        self._kernels.rotate_and_store[(qkv.shape[0],)](
            qkv, *(qkv if extra is None else extra for extra in (w.qkv_bias, w.q_norm, w.k_norm)), cache.cos, cache.sin,
            q, *cache.layer(layer), *held, self.length, cache.max_context, self.spec.norm_eps,
            HEADS=s.heads, HEADS_PAD=next_power_of_2(s.heads), KV_HEADS=s.kv_heads,
            KV_PAD=next_power_of_2(s.kv_heads), DIM=s.head_dim, BIAS=w.qkv_bias is not None,
            HEAD_NORM=w.q_norm is not None, num_warps=4,
        )  # fmt: skip
        if cache.scales:
            return q.transpose(1, 2), *held.transpose(2, 3)
        return q.transpose(1, 2), cache.keys[layer, :, :, : self.length], cache.values[layer, :, :, : self.length]

    def _gated(self, gate_up: Tensor) -> Tensor:
        out = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
        silu_and_mul(self._launch, gate_up, out)
        return out

    def _add_norm(self, step: Step, stream: ResidualStream, added: Sequence[Tensor], norm: Tensor) -> Tensor:
        out = torch.empty(stream.current.shape, dtype=self.weights.dtype, device=self.weights.device)
        add_rms_norm(self._launch, step, stream, added, norm, out, self.spec.norm_eps)
        return out
