"""A peer of the CUDA engine: a model as PyTorch users write it, blocks under ``torch.compile``, a prompt or a step in one CUDA graph."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from ladder_residual.bench.timing import time_calls
from ladder_residual.engine.cuda.launcher import Launcher
from ladder_residual.engine.cuda.pdl import PdlMode
from ladder_residual.engine.cuda.timing import time_on_device
from ladder_residual.engine.reducer_choice import make_reducer
from ladder_residual.engine.rope import rope_tables, rotate
from ladder_residual.engine.spec import EngineSpec, RankSizes
from ladder_residual.engine.weights import RankWeights
from ladder_residual.links.link import Link


class PlainDecoder:
    """One function for each half of a block, a static cache, a mask over its unused end. ``all_reduce`` reduces a half's output
    before anything else happens; without it a whole block is one function."""

    def __init__(
        self,
        spec: EngineSpec,
        sizes: RankSizes,
        weights: RankWeights,
        *,
        batch: int,
        max_context: int,
        all_reduce: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        if spec.qkv_bias or spec.head_norm:
            raise ValueError(f"the plain block knows Llama's attention, not that of {spec.shape.family}")
        self.spec, self.sizes, self.weights, self.all_reduce = spec, sizes, weights, all_reduce
        self.block, self.attention, self.mlp = self.plain_block, self.plain_attention, self.plain_mlp
        shape = (batch, sizes.kv_heads, max_context, sizes.head_dim)
        self.caches = [tuple(weights.embedding.new_zeros(shape) for _ in range(2)) for _ in weights.layers]
        self.position = torch.zeros(1, dtype=torch.int64, device=weights.device)
        self.places = torch.arange(max_context, device=weights.device)
        self.cos, self.sin = (table.to(weights.dtype) for table in rope_tables(spec, max_context, weights.device))

    def compile(self) -> None:
        self.block, self.attention, self.mlp = (
            torch.compile(part, fullgraph=True, dynamic=False) for part in (self.block, self.attention, self.mlp)
        )

    def step(self, tokens: Tensor) -> Tensor:
        """(B) tokens -> logits (B, this rank's vocabulary); every sequence is as long as ``position`` says."""
        logits = self._forward(tokens[:, None], self.position)
        self.position += 1
        return logits

    def prompt(self, tokens: Tensor) -> Tensor:
        """(B, S) prompts of one length -> logits (B, this rank's vocabulary) after the last token."""
        self.position.fill_(tokens.shape[1])
        return self._forward(tokens, self.places[: tokens.shape[1]])

    def _forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Rows are (sequence, position) pairs; ``positions`` are the same for all sequences."""
        local = tokens.flatten() - self.sizes.vocab_first
        mine = (local >= 0) & (local < self.sizes.vocab_tokens)
        x = F.embedding(local.clamp(0, self.sizes.vocab_tokens - 1), self.weights.embedding) * mine[:, None]
        x = x if self.all_reduce is None else self.all_reduce(x)
        delta = torch.zeros_like(x)
        seen = (self.places <= positions[:1])[None, None, None]
        turn = (self.cos[positions], self.sin[positions])
        for w, cache in zip(self.weights.layers, self.caches, strict=True):
            reading = (w.input_norm, w.qkv, w.output, *cache, positions, seen, *turn)
            writing = (w.post_attention_norm, w.gate_up, w.down)
            if self.all_reduce is None:
                x, delta = self.block(x, delta, reading, writing)
                continue
            x, partial = self.attention(x, delta, *reading)
            x, partial = self.mlp(x, self.all_reduce(partial), *writing)
            delta = self.all_reduce(partial)
        last = (x + delta).unflatten(0, tokens.shape)[:, -1]
        return F.linear(self._norm(last, self.weights.final_norm), self.weights.head)

    def plain_block(
        self, x: Tensor, delta: Tensor, reading: tuple[Tensor, ...], writing: tuple[Tensor, ...]
    ) -> tuple[Tensor, Tensor]:
        return self.plain_mlp(*self.plain_attention(x, delta, *reading), *writing)

    def plain_attention(
        self, x: Tensor, delta: Tensor, norm: Tensor, qkv: Tensor, output: Tensor, keys: Tensor, values: Tensor,
        positions: Tensor, seen: Tensor, cos: Tensor, sin: Tensor,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        s, x, steps = self.sizes, x + delta, positions.shape[0]
        heads = F.linear(self._norm(x, norm), qkv).view(-1, steps, qkv.shape[0] // s.head_dim, s.head_dim).transpose(1, 2)
        q, k, v = heads.split([s.heads, s.kv_heads, s.kv_heads], dim=1)
        q, k, many = rotate(q, cos, sin), rotate(k, cos, sin), s.group > 1
        keys.index_copy_(2, positions, k)
        values.index_copy_(2, positions, v)
        if steps > 1:  # a prompt has no past
            read = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=many)
        else:
            read = F.scaled_dot_product_attention(q, keys, values, attn_mask=seen, enable_gqa=many)
        return x, F.linear(read.transpose(1, 2).reshape(x.shape[0], -1), output)

    def plain_mlp(
        self, x: Tensor, delta: Tensor, norm: Tensor, gate_up: Tensor, down: Tensor
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        x = x + delta
        gate, up = F.linear(self._norm(x, norm), gate_up).chunk(2, dim=-1)
        return x, F.linear(F.silu(gate) * up, down)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, self.spec.norm_eps)


class PlainGraphs:
    """The decoder compiled, its prompt (of one length) and its step recorded when first asked for. All-reduces of tp > 1 are
    emulated, in line."""

    def __init__(
        self,
        spec: EngineSpec,
        sizes: RankSizes,
        weights: RankWeights,
        link: Link,
        *,
        batch: int,
        max_context: int,
        prompt: int = 1,
    ) -> None:
        self._began = time.perf_counter()
        all_reduce = _emulated(sizes, weights, link)
        self.decoder = PlainDecoder(spec, sizes, weights, batch=batch, max_context=max_context, all_reduce=all_reduce)
        self.decoder.compile()
        self.tokens = torch.zeros(batch, dtype=torch.int64, device=weights.device)
        self.prompts = torch.zeros(batch, prompt, dtype=torch.int64, device=weights.device)

    def steps(self, context: int, repeats: int) -> tuple[list[float], float]:
        """Milliseconds of decode steps around ``context``, and the seconds until the first."""
        graph, _ = self._step
        warm_up = time.perf_counter() - self._began
        self.decoder.position.fill_(context - repeats // 2)
        return time_on_device(graph.replay, repeats + 5)[5:], warm_up

    def prefill(self, repeats: int) -> list[float]:
        """Milliseconds of reading the prompts."""
        return time_calls(self._read[0].replay, repeats)

    def generate(self, new: int, repeats: int) -> list[float]:
        """Milliseconds from the prompts to the last of ``new`` tokens, greedy, chosen on the device."""
        (read, first), (step, following) = self._read, self._step

        def whole() -> None:
            read.replay()
            self.tokens.copy_(first.argmax(-1))
            for _ in range(new - 1):
                step.replay()
                self.tokens.copy_(following.argmax(-1))

        return time_calls(whole, repeats)

    @cached_property
    def _read(self) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        return self._record(lambda: self.decoder.prompt(self.prompts))

    @cached_property
    def _step(self) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        return self._record(lambda: self.decoder.step(self.tokens))

    @torch.no_grad()
    def _record(self, call: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            for _ in range(3):  # compiles, and sets up cuBLAS, before the recording
                call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            logits = call()
        return graph, logits


def _emulated(sizes: RankSizes, weights: RankWeights, link: Link) -> Callable[[Tensor], Tensor] | None:
    if sizes.tp == 1:
        return None
    reducer = make_reducer(
        "emulated", tp=sizes.tp, link=link, groups=None, dtype=weights.dtype, device=weights.device
    )  # fmt: skip
    if reducer.is_noop:
        return lambda partial: partial

    def all_reduce(partial: Tensor) -> Tensor:
        reduced = torch.empty_like(partial)
        reducer.reduce(partial, reduced, 0, Launcher(PdlMode.OFF))
        return reduced

    return all_reduce
