"""What a user would have otherwise, in the same run on the same card: transformers with a static cache and compile."""

from __future__ import annotations

import time
from statistics import median
from typing import Any

import torch

from .environment import environment
from .gpu import DTYPE, Shard, read_bandwidth, time_steps
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
                "engine": f"ladder-residual, {wiring}, {engine.lanes} lane(s)",
                **_row(times),
                "startup_s": round(engine.startup_seconds, 2),
            }
        )
        del engine
    torch.cuda.empty_cache()
    notes = []
    try:
        times, warm_up = _transformers_steps(shard, context, repeats)
        rows.append({"engine": "transformers, static cache + compile", **_row(times), "startup_s": round(warm_up, 2)})
    except Exception as error:  # a peer that does not run here is a fact about the peer, not a reason to lose our rows
        notes.append(f"transformers did not run: {type(error).__name__}: {str(error)[:200]}")
    bandwidth = max(bandwidth, read_bandwidth())
    for row in rows:
        row["roofline_share"] = round(1e3 * shard.bytes_per_step(1, context) / bandwidth / row["ms_per_token"], 4)
    return {
        "benchmark": "peers", "emulated": False, "model": shard.name, "tp": 1, "context": context, "layers": shard.sizes.layers,
        "read_bandwidth_tb_s": round(bandwidth / 1e12, 3), "rows": rows, "notes": notes, **environment(),
    }  # fmt: skip


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
