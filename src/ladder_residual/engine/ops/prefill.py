"""Modules for many tokens at once: cuBLAS and fused attention, because prefill is bound by arithmetic.

``PrefillOps`` is plain PyTorch throughout. On a GPU ``FusedPrefillOps`` takes its place: what lies between the products are three
kernels instead of some twenty operations a layer, which the host could not start fast enough to keep the card busy.

Prompts are padded on the right: under a causal mask a pad never changes an earlier token, and decode overwrites its cache entry.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ._triton import triton
from .cache import KVCache
from .gemm_ops import absorb_norm, silu_multiply
from .lane import Lane
from .launcher import Launcher
from .rope import rotate
from .schedule import Step
from .spec import EngineSpec, RankSizes
from .weights import LayerWeights, RankWeights


class PrefillOps:
    """Rows of a stream are (sequence, position) pairs. The same contract as the decode ops."""

    launchers: Sequence[object] = ()
    early_sums = reads_before = False

    def __init__(self, spec: EngineSpec, sizes: RankSizes, weights: RankWeights, cache: KVCache, steps: int) -> None:
        self.spec, self.sizes, self.weights, self.cache, self.steps = spec, sizes, weights, cache, steps
        self.last: Tensor | None = None  # rows to give logits for: each prompt's last token
        self._made: dict[str, Tensor] = {}  # between the parts of a module; taken out by the part that reads it

    def embed(self, tokens: Tensor, message: Tensor) -> None:
        local = tokens.reshape(-1) - self.sizes.vocab_first
        mine = (local >= 0) & (local < self.sizes.vocab_rows)
        message.copy_(self.weights.embedding[local.clamp(0, self.sizes.vocab_rows - 1)] * mine.unsqueeze(-1))

    def qkv(self, step: Step, lane: Lane, absorbed: Sequence[Tensor]) -> None:
        w = self.weights.layers[step.layer]
        self._made["qkv"] = F.linear(self._absorb_norm(step, lane, absorbed, w.first_norm), w.qkv)

    def attend(self, step: Step, launch: Launcher) -> None:
        keys, values = self.cache.keys[step.layer], self.cache.values[step.layer]
        q = self._rotate_and_store(self._made.pop("qkv"), self.weights.layers[step.layer], keys, values)
        k, v = keys[:, :, : self.steps], values[:, :, : self.steps]
        self._made["attended"] = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.sizes.group > 1)

    def output(self, step: Step, launch: Launcher, lane: Lane, message: Tensor) -> None:
        attended = self._made.pop("attended").transpose(1, 2).reshape(message.shape[0], -1)
        self._project(step, lane, attended, self.weights.layers[step.layer].output, message, None)

    def gate_up(self, step: Step, lane: Lane, absorbed: Sequence[Tensor]) -> None:
        w = self.weights.layers[step.layer]
        normed = self._absorb_norm(step, lane, absorbed, w.first_norm if step.first_norm else w.second_norm)
        self._made["act"] = self._gated(F.linear(normed, w.gate_up))

    def down(self, step: Step, lane: Lane, message: Tensor, other: Tensor | None) -> None:
        self._project(step, lane, self._made.pop("act"), self.weights.layers[step.layer].down, message, other)

    def head(self, step: Step, lane: Lane, absorbed: Sequence[Tensor], logits: Tensor) -> None:
        normed = self._absorb_norm(step, lane, absorbed, self.weights.final_norm)
        rows = normed if self.last is None else normed[self.last]
        torch.mm(rows, self.weights.head.T, out=logits)

    def _rotate_and_store(self, qkv: Tensor, w: LayerWeights, keys: Tensor, values: Tensor) -> Tensor:
        """Queries (B, heads, S, D), rotated; the keys and values go into the cache."""
        s, cache, steps = self.sizes, self.cache, self.steps
        if w.qkv_bias is not None:
            qkv = qkv + w.qkv_bias
        heads = qkv.view(cache.batch, steps, -1, s.head_dim).transpose(1, 2)
        q, k, v = heads.split([s.heads, s.kv_heads, s.kv_heads], dim=1)
        if w.q_norm is not None and w.k_norm is not None:
            q, k = self._rms(q.float(), w.q_norm), self._rms(k.float(), w.k_norm)
        cos, sin = cache.cos[:steps], cache.sin[:steps]
        keys[:, :, :steps] = rotate(k.float(), cos, sin).to(v.dtype)
        values[:, :, :steps] = v
        return rotate(q.float(), cos, sin).to(v.dtype)

    def _gated(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

    def _absorb_norm(self, step: Step, lane: Lane, absorbed: Sequence[Tensor], norm: Tensor) -> Tensor:
        old, new = lane.advance(stores=step.stores_stream)
        if absorbed:
            if not step.stores_stream:
                new = torch.empty_like(old)
            if step.keeps_stream:
                torch.add(old, absorbed[0], out=new)
            else:
                new.copy_(absorbed[0])
            for output in absorbed[1:]:
                new.add_(output)
        return self._rms(new, norm).to(self.weights.dtype)

    def _rms(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight.float(), self.spec.norm_eps)

    def _project(self, step: Step, lane: Lane, x: Tensor, weight: Tensor, message: Tensor, other: Tensor | None) -> None:
        torch.mm(x, weight.T, out=message)
        if step.adds_stream:
            message.add_(lane.stream, alpha=1.0 / self.sizes.tp)
        if other is not None:
            message.add_(other)


class FusedPrefillOps(PrefillOps):
    def __init__(self, spec: EngineSpec, sizes: RankSizes, weights: RankWeights, cache: KVCache, steps: int) -> None:
        from . import kernels_prompt

        super().__init__(spec, sizes, weights, cache, steps)
        self._prompt, self._launch = kernels_prompt, Launcher(pdl=0)

    def _rotate_and_store(self, qkv: Tensor, w: LayerWeights, keys: Tensor, values: Tensor) -> Tensor:
        s, cache = self.sizes, self.cache
        # laid out as attention's output will be, so that this needs no copy either
        q = qkv.new_empty(cache.batch, self.steps, s.heads, s.head_dim)
        self._prompt.rotate_and_store[(qkv.shape[0],)](
            qkv, *(qkv if one is None else one for one in (w.qkv_bias, w.q_norm, w.k_norm)), cache.cos, cache.sin,
            q, keys, values, self.steps, cache.max_context, self.spec.norm_eps,
            HEADS=s.heads, HEADS_PAD=triton.next_power_of_2(s.heads), KV_HEADS=s.kv_heads,
            KV_PAD=triton.next_power_of_2(s.kv_heads), DIM=s.head_dim, BIAS=w.qkv_bias is not None,
            HEAD_NORM=w.q_norm is not None, num_warps=4,
        )  # fmt: skip
        return q.transpose(1, 2)

    def _gated(self, gate_up: Tensor) -> Tensor:
        out = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
        silu_multiply(self._launch, gate_up, out)
        return out

    def _absorb_norm(self, step: Step, lane: Lane, absorbed: Sequence[Tensor], norm: Tensor) -> Tensor:
        out = torch.empty(lane.stream.shape, dtype=self.weights.dtype, device=self.weights.device)
        absorb_norm(self._launch, step, lane, absorbed, norm, out, self.spec.norm_eps)
        return out
