"""Decode, prefill and end-to-end benchmarks of the CUDA engine on one GPU holding one rank of a tensor-parallel model.

With tp > 1 every all-reduce is emulated (``engine/reducers.py``) and every result says so. The functions return dicts for JSON;
``ladder bench`` and ``lab/runs`` call them.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

import torch

from ..common.environment import environment
from ..core.config import Wiring
from ..distributed.world import World
from ..engine.cache import KVCache
from ..engine.checks import check_request
from ..engine.cuda.timing import time_on_device
from ..engine.engine import DecodeEngine
from ..engine.ops.tiles import GemvTiles
from ..engine.random_rank import RandomRank
from ..engine.spec import EngineSpec
from ..links import parse_link
from ..plan.models import resolve_model
from .timing import ONE_PROCESS, spread, time_calls, time_calls_in_turns


def bench_decode(
    *,
    model: str = "llama-3-70b",
    tp: int = 8,
    batches: Sequence[int] = (1,),
    wirings: Sequence[str] = ("standard", "ladder"),
    links: Sequence[str] = ("none", "24us"),
    context: int = 1280,
    max_context: int | None = None,
    schedule: str = "auto",
    gemm_backend: str = "auto",
    repeats: int = 40,
    layers: int | None = None,
    weights: str = "bf16",
    kv_cache_dtype: str = "auto",
    rank: RandomRank | None = None,
) -> dict[str, Any]:
    """Time of one decode step at ``context`` for every (batch, link, wiring); the no-communication bound comes with each batch."""
    from .roofline import read_bandwidth  # imports Triton

    if context <= repeats // 2:
        raise ValueError(f"{repeats} steps around a context of {context} tokens begin before its first: lower the repeats")
    max_context = max_context or max(2 * context, 2048)
    links = links_of(links, tp)
    check_cases(rank or model, tp, layers, batches, wirings, links, max_context, schedule, gemm_backend)
    rank = rank or RandomRank(*resolve_model(model), tp, layers=layers, weights=weights, kv_cache_dtype=kv_cache_dtype)
    bandwidth = read_bandwidth()
    rows: list[dict[str, Any]] = []
    for batch in batches:
        quiet: DecodeEngine | None = None  # standard without communication, timed beside every link
        cache: KVCache | None = None  # one for all of a batch's engines, which run in turns
        for link_name in dict.fromkeys(("none", *links)):
            link = parse_link(link_name, tp=tp)
            asked = wirings if link_name in links else ("standard",)
            # no-comm never communicates: one row is enough
            shown = [wiring for wiring in asked if wiring != "no-comm" or link_name == "none"]
            engines: dict[str, DecodeEngine] = {}
            for wiring in sorted(shown, key=lambda wiring: wiring != "standard"):
                asked_for: dict[str, Any] = dict(schedule=schedule, gemm_backend=gemm_backend, cache=cache)
                engines[wiring] = rank.engine(wiring, link, batch=batch, max_context=max_context, **asked_for)
                cache = engines[wiring].cache
            if not engines:
                continue
            quiet = engines.get("standard") if link_name == "none" else quiet
            times = time_in_turns([*engines.values(), *([quiet] if quiet else [])], context, repeats)
            sized = {"batch": batch, "link": link_name, "link_us": round(link.us(batch * rank.sizes.hidden * 2, tp), 2)}
            compared = (times.get(id(engines.get("standard"))), times.get(id(quiet)))
            rows += [
                {**sized, "pdl": link.pdl, "wiring": wiring, **_decode_row(engine, times[id(engine)], *compared)}
                for wiring, engine in engines.items()
            ]
            engines.clear()
            torch.cuda.empty_cache()
    # the card's clocks move: the better of two measurements, before and after, is the roofline
    bandwidth = max(bandwidth, read_bandwidth())
    for row in rows:
        floor_ms = 1e3 * rank.bytes_per_step(row["batch"], context) / bandwidth
        row["roofline_share"] = round(floor_ms / row["ms_per_token"], 4)
    return {
        "benchmark": "decode",
        "emulated": tp > 1,
        "model": rank.name,
        "tp": tp,
        "layers": rank.sizes.layers,
        "context": context,
        "dtype": "bfloat16",
        "weights": rank.weights_name,
        "kv_cache_dtype": rank.kv_cache_dtype,
        "gigabytes_per_step_batch_1": round(rank.bytes_per_step(1, context) / 1e9, 3),
        "read_bandwidth_tb_s": round(bandwidth / 1e12, 3),
        "rows": rows,
        **environment(),
    }


def _decode_row(
    engine: DecodeEngine, times: Sequence[float], standard: Sequence[float] | None, bound: Sequence[float] | None
) -> dict[str, Any]:
    """What an engine's steps took, beside those of standard and of standard without communication, timed in turns with it."""
    step = median(times)
    return {
        "schedule": engine.schedule,
        "gemm_backend": engine.gemm_backend,
        "schedules_tried_ms": {name: round(time_ms, 4) for name, time_ms in engine.step_ms.items()},
        "ms_per_token": round(step, 4),
        **spread(times),
        "tokens_per_s": round(engine.batch * 1e3 / step, 1),
        "over_standard": round(median(standard) / step, 4) if standard else None,
        "bound_ms": round(median(bound), 4) if bound else None,
        "of_no_comm_bound": round(median(bound) / step, 4) if bound else None,
        "startup_s": round(engine.startup_seconds, 2),
    }


def bench_prefill(
    *, model: str = "llama-3-70b", tp: int = 8, batches: Sequence[int] = (1,), prompt: int = 1024,
    wirings: Sequence[str] = ("standard", "ladder"), links: Sequence[str] = ("none", "24us"), repeats: int = 5,
    layers: int | None = None, kv_cache_dtype: str = "auto", rank: RandomRank | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Time to the first token. Prefill runs eagerly, so short prompts are bound by launches, not by the card."""
    links = links_of(links, tp)
    check_cases(rank or model, tp, layers, batches, wirings, links, prompt + 16)
    rank = rank or RandomRank(*resolve_model(model), tp, layers=layers, kv_cache_dtype=kv_cache_dtype)
    rows: list[dict[str, Any]] = []
    for batch, link_name in itertools.product(batches, links):
        tokens = torch.randint(0, rank.sizes.vocab_rows, (batch, prompt), device="cuda")
        link = parse_link(link_name, tp=tp)
        # what a decode step would choose does not matter here, so nothing is timed for it
        decode: dict[str, Any] = dict(
            schedule="serial", gemm_backend="cublas", tiles=GemvTiles.candidates(rank.sizes, prompt + 16)[0]
        )
        engines = {wiring: rank.engine(wiring, link, batch=batch, max_context=prompt + 16, **decode) for wiring in wirings}
        taken = time_calls_in_turns({wiring: partial(engine.prefill, tokens) for wiring, engine in engines.items()}, repeats)
        baseline = median(taken["standard"]) if "standard" in taken else None
        for wiring, times in taken.items():
            rows.append(
                {
                    "batch": batch,
                    "link": link_name,
                    "link_us": round(link.us(batch * prompt * rank.sizes.hidden * 2, tp), 2),
                    "wiring": wiring,
                    "ms": round(median(times), 3),
                    **spread(times),
                    "over_standard": round(baseline / median(times), 4) if baseline else None,
                }
            )
        del engines
        torch.cuda.empty_cache()
    return {
        "benchmark": "prefill", "emulated": tp > 1, "model": rank.name, "tp": tp, "prompt": prompt,
        "layers": rank.sizes.layers, "kv_cache_dtype": rank.kv_cache_dtype, "rows": rows, **environment(),
    }  # fmt: skip


def bench_e2e(
    *, model: str = "llama-3-70b", tp: int = 8, batches: Sequence[int] = (1,), prompt: int = 1024, new: int = 512,
    wirings: Sequence[str] = ("standard", "ladder"), links: Sequence[str] = ("24us",), repeats: int = 3, layers: int | None = None,
    kv_cache_dtype: str = "auto", rank: RandomRank | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Prompt to last token, greedy, tokens chosen on the device: the paper's measure (tokens/s counts generated tokens)."""
    links = links_of(links, tp)
    check_cases(rank or model, tp, layers, batches, wirings, links, prompt + new + 8)
    rank = rank or RandomRank(*resolve_model(model), tp, layers=layers, kv_cache_dtype=kv_cache_dtype)
    rows: list[dict[str, Any]] = []
    for batch, link_name in itertools.product(batches, links):
        prompts = torch.randint(0, rank.sizes.vocab_rows, (batch, prompt), device="cuda")
        link = parse_link(link_name, tp=tp)
        baseline = None
        for wiring in sorted(wirings, key=lambda wiring: wiring != "standard"):
            engine = rank.engine(wiring, link, batch=batch, max_context=prompt + new + 8)
            times = time_calls(partial(generate, engine, prompts, new), repeats)
            rate = batch * new * 1e3 / median(times)
            baseline = rate if wiring == "standard" else baseline
            rows.append(
                {
                    "batch": batch,
                    "link": link_name,
                    "wiring": wiring,
                    "schedule": engine.schedule,
                    "gemm_backend": engine.gemm_backend,
                    "seconds": round(median(times) / 1e3, 4),
                    **spread(times),
                    "tokens_per_s": round(rate, 2),
                    "over_standard": round(rate / baseline, 4) if baseline else None,
                }
            )
            del engine
            torch.cuda.empty_cache()
    return {
        "benchmark": "e2e", "emulated": tp > 1, "model": rank.name, "tp": tp, "prompt": prompt, "new": new,
        "layers": rank.sizes.layers, "kv_cache_dtype": rank.kv_cache_dtype, "rows": rows, **environment(),
    }  # fmt: skip


def generate(engine: DecodeEngine, prompts: torch.Tensor, new: int) -> None:
    tokens = engine.argmax(engine.prefill(prompts))
    for _ in range(new - 1):
        tokens = engine.argmax(engine.decode(tokens))


def check_cases(
    model: str | RandomRank, tp: int, layers: int | None, batches: Sequence[int], wirings: Sequence[str], links: Sequence[str],
    max_context: int, schedule: str = "auto", gemm_backend: str = "auto",
) -> None:  # fmt: skip
    """Everything asked for, before the first weight is made: a mistake in the last case must not cost the rows before it."""
    if isinstance(model, RandomRank):
        spec = model.spec
    else:
        shape = resolve_model(model)[1]
        spec = EngineSpec.from_shape(replace(shape, num_layers=layers) if layers is not None else shape)
    for link in links:
        parse_link(link, tp=tp)
    for batch, wiring in itertools.product(batches, wirings):
        wired = Wiring.parse(wiring, spec.shape.num_layers)
        check_request(
            spec, wired, batch=batch, max_context=max_context, schedule=schedule, tp=tp, gemm_backend=gemm_backend
        )  # fmt: skip


def links_of(links: Sequence[str], tp: int) -> Sequence[str]:
    """One rank reduces with nobody, whatever the link."""
    return links if tp > 1 else ("none",)


def time_in_turns(
    engines: Sequence[DecodeEngine], context: int, repeats: int, turns: int = 5, world: World = ONE_PROCESS
) -> dict[int, list[float]]:
    """Milliseconds of single graph replays by ``id`` of the engine, each between its own pair of events; the context grows by one a step.
    The engines take turns: a card's speed drifts, and so it does for all of them alike. Of the ranks of ``world`` the slowest counts."""
    taken: dict[int, list[float]] = {id(engine): [] for engine in engines}
    first = context - repeats // 2
    bounds = [first + repeats * turn // turns for turn in range(turns + 1)]
    for turn, (start, stop) in enumerate(itertools.pairwise(bounds)):
        for engine in {id(engine): engine for engine in engines}.values():
            engine.reset(start, random_context=turn == 0)
            world.barrier()
            for _ in range(3):
                engine.replay()
            engine.reset(start)
            if world.size > 1:
                torch.cuda.synchronize()
            taken[id(engine)] += world.slowest(time_on_device(engine.replay, stop - start))
    return taken
