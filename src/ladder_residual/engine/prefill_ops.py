"""Modules for many tokens at once: plain PyTorch (cuBLAS and fused attention), because prefill is bound by arithmetic.

Prompts are padded on the right: under a causal mask a pad never changes an earlier token, and decode overwrites its cache entry.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from .cache import KVCache
from .lane import Lane
from .rope import rotate
from .schedule import Step
from .spec import EngineSpec, RankSizes
from .weights import RankWeights


class PrefillOps:
    """Rows of a stream are (sequence, position) pairs. The same contract as the decode ops."""

    launchers: Sequence[object] = ()

    def __init__(self, spec: EngineSpec, sizes: RankSizes, weights: RankWeights, cache: KVCache, steps: int) -> None:
        self.spec, self.sizes, self.weights, self.cache, self.steps = spec, sizes, weights, cache, steps
        self.last: Tensor | None = None  # rows to give logits for: each prompt's last token

    def embed(self, tokens: Tensor, message: Tensor) -> None:
        local = tokens.reshape(-1) - self.sizes.vocab_first
        mine = (local >= 0) & (local < self.sizes.vocab_rows)
        message.copy_(self.weights.embedding[local.clamp(0, self.sizes.vocab_rows - 1)] * mine.unsqueeze(-1))

    def attention(self, step: Step, lane: Lane, absorbed: Sequence[Tensor], message: Tensor, other: Tensor | None) -> None:
        s, w, cache = self.sizes, self.weights.layers[step.layer], self.cache
        qkv = F.linear(self._absorb_norm(step, lane, absorbed, w.first_norm), w.qkv, w.qkv_bias)
        heads = qkv.view(cache.batch, self.steps, -1, s.head_dim).transpose(1, 2)
        q, k, v = heads.split([s.heads, s.kv_heads, s.kv_heads], dim=1)
        if w.q_norm is not None and w.k_norm is not None:
            q, k = self._rms(q.float(), w.q_norm), self._rms(k.float(), w.k_norm)
        cos, sin = cache.cos[: self.steps], cache.sin[: self.steps]
        q = rotate(q.float(), cos, sin).to(v.dtype)
        k = rotate(k.float(), cos, sin).to(v.dtype)
        cache.keys[step.layer, :, :, : self.steps] = k
        cache.values[step.layer, :, :, : self.steps] = v
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=s.group > 1)
        torch.mm(out.transpose(1, 2).reshape(message.shape[0], -1), w.output.T, out=message)
        self._additions(step, lane, message, other)

    def mlp(self, step: Step, lane: Lane, absorbed: Sequence[Tensor], message: Tensor, other: Tensor | None) -> None:
        w = self.weights.layers[step.layer]
        normed = self._absorb_norm(step, lane, absorbed, w.first_norm if step.first_norm else w.second_norm)
        gate, up = F.linear(normed, w.gate_up).chunk(2, dim=-1)
        torch.mm(F.silu(gate) * up, w.down.T, out=message)
        self._additions(step, lane, message, other)

    def head(self, step: Step, lane: Lane, absorbed: Sequence[Tensor], logits: Tensor) -> None:
        normed = self._absorb_norm(step, lane, absorbed, self.weights.final_norm)
        rows = normed if self.last is None else normed[self.last]
        torch.mm(rows, self.weights.head.T, out=logits)

    def _absorb_norm(self, step: Step, lane: Lane, absorbed: Sequence[Tensor], norm: Tensor) -> Tensor:
        if absorbed:
            old, new = lane.advance()
            if step.keeps_stream:
                torch.add(old, absorbed[0], out=new)
            else:
                new.copy_(absorbed[0])
            for output in absorbed[1:]:
                new.add_(output)
        return self._rms(lane.stream, norm).to(self.weights.dtype)

    def _rms(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight.float(), self.spec.norm_eps)

    def _additions(self, step: Step, lane: Lane, message: Tensor, other: Tensor | None) -> None:
        if step.adds_stream:
            message.add_(lane.stream, alpha=1.0 / self.sizes.tp)
        if other is not None:
            message.add_(other)
