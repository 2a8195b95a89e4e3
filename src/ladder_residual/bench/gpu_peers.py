"""What a user would have otherwise, in the same run on the same card: transformers with a static cache and compile, and a plain
loop over compiled blocks in one CUDA graph."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..engine.rope import rope_tables, rotate
from ..engine.spec import EngineSpec, RankSizes
from ..engine.weights import RankWeights
from .environment import environment
from .gpu import DTYPE, Shard, read_bandwidth, time_on_device, time_steps
from .gpu_report import spread


def bench_peers(
    *, model: str = "llama-3.1-8b", context: int = 1100, repeats: int = 40, layers: int | None = None
) -> dict[str, Any]:
    """One GPU, batch 1, whole model: our engine and transformers (static cache, compiled decode step, CUDA graphs)."""
    from ..engine.emulate import parse_link

    shard = Shard(model, 1, layers=layers)
    bandwidth = read_bandwidth()
    rows: list[dict[str, Any]] = []
    for wiring in ("standard", "ladder"):
        engine = shard.engine(wiring, parse_link("none"), batch=1, max_context=2048)
        times = time_steps(engine, context, repeats)
        rows.append(
            {
                "engine": f"ladder-residual, {wiring}",
                **_row(times),
                "startup_s": round(engine.startup_seconds, 2),
            }
        )
        del engine
    torch.cuda.empty_cache()
    notes = []
    for name, steps in (
        ("compiled blocks in one CUDA graph", _compiled_block_steps),
        ("transformers, static cache + compile", _transformers_steps),
    ):
        try:
            times, warm_up = steps(shard, context, repeats)
            rows.append({"engine": name, **_row(times), "startup_s": round(warm_up, 2)})
        except Exception as error:  # a peer that does not run here is a fact about the peer, not a reason to lose our rows
            notes.append(f"{name} did not run: {type(error).__name__}: {str(error)[:200]}")
        torch.cuda.empty_cache()
    bandwidth = max(bandwidth, read_bandwidth())
    for row in rows:
        row["roofline_share"] = round(1e3 * shard.bytes_per_step(1, context) / bandwidth / row["ms_per_token"], 4)
    return {
        "benchmark": "peers", "emulated": False, "model": shard.name, "tp": 1, "context": context, "layers": shard.sizes.layers,
        "read_bandwidth_tb_s": round(bandwidth / 1e12, 3), "rows": rows, "notes": notes, **environment(),
    }  # fmt: skip


class PlainDecoder:
    """The decode step as PyTorch users write it: one function for all blocks, a static cache, a mask over its unused end."""

    def __init__(self, spec: EngineSpec, sizes: RankSizes, weights: RankWeights, *, batch: int, max_context: int) -> None:
        if spec.qkv_bias or spec.head_norm:
            raise ValueError(f"the plain block knows Llama's attention, not that of {spec.shape.family}")
        self.spec, self.sizes, self.weights = spec, sizes, weights
        self.block: Callable[..., Tensor] = self.plain_block
        shape = (batch, sizes.kv_heads, max_context, sizes.head_dim)
        self.caches = [tuple(weights.embedding.new_zeros(shape) for _ in range(2)) for _ in weights.layers]
        self.position = torch.zeros(1, dtype=torch.int64, device=weights.device)
        self.places = torch.arange(max_context, device=weights.device)
        self.cos, self.sin = (table.to(weights.dtype) for table in rope_tables(spec, max_context, weights.device))

    def step(self, tokens: Tensor) -> Tensor:
        """(B) tokens -> logits (B, vocabulary); every sequence is as long as ``position`` says."""
        x = F.embedding(tokens, self.weights.embedding)
        seen = (self.places <= self.position)[None, None, None]
        turn = (self.cos[self.position], self.sin[self.position])
        for w, cache in zip(self.weights.layers, self.caches, strict=True):
            matrices = (w.first_norm, w.qkv, w.output, w.second_norm, w.gate_up, w.down)
            x = self.block(x, *matrices, *cache, self.position, seen, *turn)
        self.position += 1
        return F.linear(self._norm(x, self.weights.final_norm), self.weights.head)

    def plain_block(
        self, x: Tensor, first_norm: Tensor, qkv: Tensor, output: Tensor, second_norm: Tensor, gate_up: Tensor, down: Tensor,
        keys: Tensor, values: Tensor, position: Tensor, seen: Tensor, cos: Tensor, sin: Tensor,
    ) -> Tensor:  # fmt: skip
        s = self.sizes
        heads = F.linear(self._norm(x, first_norm), qkv).view(x.shape[0], 1, -1, s.head_dim).transpose(1, 2)
        q, k, v = heads.split([s.heads, s.kv_heads, s.kv_heads], dim=1)
        keys.index_copy_(2, position, rotate(k, cos, sin))
        values.index_copy_(2, position, v)
        read = F.scaled_dot_product_attention(rotate(q, cos, sin), keys, values, attn_mask=seen, enable_gqa=s.group > 1)
        x = x + F.linear(read.transpose(1, 2).flatten(1), output)
        gate, up = F.linear(self._norm(x, second_norm), gate_up).chunk(2, dim=-1)
        return x + F.linear(F.silu(gate) * up, down)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, self.spec.norm_eps)


@torch.no_grad()
def _compiled_block_steps(shard: Shard, context: int, repeats: int) -> tuple[list[float], float]:
    began = time.perf_counter()
    decoder = PlainDecoder(shard.spec, shard.sizes, shard.weights, batch=1, max_context=2048)
    decoder.block = torch.compile(decoder.plain_block, fullgraph=True, dynamic=False)
    token = torch.zeros(1, dtype=torch.int64, device="cuda")
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):  # compiles, and sets up cuBLAS, before the recording
            decoder.step(token)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        decoder.step(token)
    warm_up = time.perf_counter() - began
    decoder.position.fill_(context - repeats // 2)
    return time_on_device(graph.replay, repeats + 5)[5:], warm_up


def _row(times: list[float]) -> dict[str, Any]:
    return {"ms_per_token": round(median(times), 4), **spread(times)}


def _transformers_steps(shard: Shard, context: int, repeats: int) -> tuple[list[float], float]:
    """Milliseconds per decode step as ``generate`` compiles it: forward under reduce-overhead with a static cache."""
    from transformers import AutoModelForCausalLM, LlamaConfig, StaticCache

    shape = shard.spec.shape
    config = LlamaConfig(
        hidden_size=shape.hidden_size, intermediate_size=shape.intermediate_size, num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads, num_key_value_heads=shape.num_kv_heads, head_dim=shape.head_dim,
        vocab_size=shape.vocab_size, max_position_embeddings=4096, tie_word_embeddings=shape.tied_embeddings,
    )  # fmt: skip
    torch.set_default_dtype(DTYPE)
    try:
        with torch.device("cuda"):
            model = AutoModelForCausalLM.from_config(config).eval()
    finally:
        torch.set_default_dtype(torch.float32)
    cache = StaticCache(config=config, max_cache_len=2048)
    step = torch.compile(model.forward, mode="reduce-overhead", fullgraph=True)
    began = time.perf_counter()
    with torch.no_grad():
        prompt = torch.randint(0, shape.vocab_size, (1, context - repeats // 2), device="cuda")
        model(prompt, past_key_values=cache, use_cache=True)
        position = torch.tensor([context - repeats // 2], device="cuda")
        token = torch.randint(0, shape.vocab_size, (1, 1), device="cuda")
        times = []
        for index in range(repeats + 5):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.compiler.cudagraph_mark_step_begin()
            start.record()
            step(token, past_key_values=cache, cache_position=position, position_ids=position[None], use_cache=True)
            end.record()
            end.synchronize()
            position += 1
            if index == 4:
                torch.cuda.synchronize()
                warm_up = time.perf_counter() - began
            if index >= 5:
                times.append(start.elapsed_time(end))
    return times, warm_up
