"""Decode, prefill and end-to-end benchmarks of the CUDA engine on one GPU holding one rank of a tensor-parallel model.

With tp > 1 every all-reduce is emulated (``engine/emulate.py``) and every result says so. Functions take keyword arguments and
return JSON-able dicts; ``ladder bench`` and ``runs/`` call them.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

import torch

from ..config import Wiring
from ..engine.cache import KVCache
from ..engine.decoder import DecodeEngine, check_request
from ..engine.emulate import Link, parse_link
from ..engine.gemv_ops import GemvTiles
from ..engine.roofline import read_bandwidth
from ..engine.spec import EngineSpec, RankSizes
from ..engine.weights import RankWeights, random_weights, stack_weights
from ..plan.models import resolve_model
from ..presets import ModelShape
from .environment import environment
from .gpu_peers import Peers
from .gpu_report import reading_too_low, spread, sums_that_outlast_their_link
from .timing import time_calls, time_on_device

DTYPE = torch.bfloat16


class Shard:
    """One rank's random weights on the card, made once and shared by all engines of a benchmark."""

    def __init__(self, model: str | ModelShape, tp: int, *, layers: int | None = None) -> None:
        self.name, shape = resolve_model(model) if isinstance(model, str) else (model.family, model)
        if layers is not None:
            shape = ModelShape(**{**shape.to_dict(), "num_layers": layers})
        self.tp = tp
        self.spec = EngineSpec.from_shape(shape)
        self.sizes = RankSizes.of(shape, tp, 0)
        need = self.sizes.resident_bytes(2, tied=shape.tied_embeddings)
        free, _ = torch.cuda.mem_get_info()
        if need > free:
            raise ValueError(
                f"a rank of {self.name} at tp={tp} needs {need / 1e9:.1f} GB, {free / 1e9:.1f} GB are free: raise tp"
            )
        made = random_weights(self.spec, tp, 0, DTYPE, "cuda")
        self.weights: RankWeights = stack_weights(self.spec, self.sizes, made, release=True)

    def engine(
        self,
        wiring: str,
        link: Link,
        *,
        batch: int,
        max_context: int,
        schedule: str = "auto",
        products: str = "auto",
        pdl: int = 1,
        tiles: GemvTiles | None = None,
        cache: KVCache | None = None,
    ) -> DecodeEngine:
        return DecodeEngine(
            self.spec, Wiring.parse(wiring, self.spec.shape.num_layers), self.weights, tp=self.tp,
            reducer="emulated" if self.tp > 1 else "none", link=link, batch=batch, max_context=max_context, schedule=schedule,
            products=products, pdl=pdl, tiles=tiles, cache=cache,
        )  # fmt: skip

    def bytes_per_step(self, batch: int, context: int) -> int:
        """What one step must read: the weights once, and every sequence's keys and values."""
        tied = self.spec.shape.tied_embeddings
        return self.sizes.weight_bytes(2, tied=tied) + self.sizes.cache_bytes(2, batch, context)


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
    products: str = "auto",
    repeats: int = 40,
    layers: int | None = None,
    shard: Shard | None = None,
    peers: bool = False,
) -> dict[str, Any]:
    """Time of one decode step at ``context`` for every (batch, link, wiring); the no-communication bound comes with each batch."""
    if context <= repeats // 2:
        raise ValueError(f"{repeats} steps around a context of {context} tokens begin before its first: lower the repeats")
    max_context = max_context or max(2 * context, 2048)
    links = links_of(links, tp)
    check_cases(shard or model, tp, layers, batches, wirings, links, max_context, schedule, products)
    shard = shard or Shard(model, tp, layers=layers)
    bandwidth = read_bandwidth()
    rows: list[dict[str, Any]] = []
    others = Peers(shard)
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
                asked_for: dict[str, Any] = dict(schedule=schedule, products=products, cache=cache)
                engines[wiring] = shard.engine(wiring, link, batch=batch, max_context=max_context, **asked_for)
                cache = engines[wiring].cache
            if not engines:
                continue
            quiet = engines.get("standard") if link_name == "none" else quiet
            times = time_in_turns([*engines.values(), *([quiet] if quiet else [])], context, repeats)
            sized = {"batch": batch, "link": link_name, "link_us": round(link.microseconds(batch * shard.sizes.hidden * 2), 2)}
            compared = (times.get(id(engines.get("standard"))), times.get(id(quiet)))
            rows += [
                {**sized, "early": link.early, "wiring": wiring, **_decode_row(engine, times[id(engine)], *compared)}
                for wiring, engine in engines.items()
            ]
            engines.clear()
            torch.cuda.empty_cache()
            if peers:
                others.decode(link_name, batch=batch, context=context, max_context=max_context, repeats=repeats)
    # the card's clocks move: the better of two measurements, before and after, is the roofline
    bandwidth = max(bandwidth, read_bandwidth())
    for row in [*rows, *others.rows]:
        floor_ms = 1e3 * shard.bytes_per_step(row["batch"], context) / bandwidth
        row["roofline_share"] = round(floor_ms / row["ms_per_token"], 4)
    others.notes += reading_too_low(rows, bandwidth) + sums_that_outlast_their_link(rows, shard.sizes.layers)
    return {
        "benchmark": "decode",
        "emulated": tp > 1,
        "model": shard.name,
        "tp": tp,
        "layers": shard.sizes.layers,
        "context": context,
        "dtype": "bfloat16",
        "weights": "random",
        "gigabytes_per_step_batch_1": round(shard.bytes_per_step(1, context) / 1e9, 3),
        "read_bandwidth_tb_s": round(bandwidth / 1e12, 3),
        "rows": rows,
        **others.compared(rows, "ms_per_token"),
        **environment(),
    }


def _decode_row(
    engine: DecodeEngine, times: Sequence[float], standard: Sequence[float] | None, bound: Sequence[float] | None
) -> dict[str, Any]:
    """What an engine's steps took, beside those of standard and of standard without communication, timed in turns with it."""
    step = median(times)
    return {
        "schedule": engine.schedule,
        "products": engine.products,
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
    layers: int | None = None, shard: Shard | None = None, peers: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Time to the first token. Prefill runs eagerly, so short prompts are bound by launches, not by the card."""
    links = links_of(links, tp)
    check_cases(shard or model, tp, layers, batches, wirings, links, prompt + 16)
    shard = shard or Shard(model, tp, layers=layers)
    rows: list[dict[str, Any]] = []
    others = Peers(shard)
    for batch, link_name in itertools.product(batches, links):
        tokens = torch.randint(0, shard.sizes.vocab_rows, (batch, prompt), device="cuda")
        link = parse_link(link_name, tp=tp)
        # what a decode step would choose does not matter here, so nothing is timed for it
        decode: dict[str, Any] = dict(
            schedule="one", products="cublas", tiles=GemvTiles.candidates(shard.sizes, prompt + 16)[0]
        )
        engines = {wiring: shard.engine(wiring, link, batch=batch, max_context=prompt + 16, **decode) for wiring in wirings}
        # in turns: the host starts these kernels one by one, and its speed drifts
        taken: dict[str, list[float]] = {wiring: [] for wiring in wirings}
        for turn in range(repeats):
            for wiring, engine in engines.items():
                taken[wiring] += time_calls(partial(engine.prefill, tokens), 1, warm_up=turn == 0)
        baseline = median(taken["standard"]) if "standard" in taken else None
        for wiring, times in taken.items():
            rows.append(
                {
                    "batch": batch,
                    "link": link_name,
                    "link_us": round(link.microseconds(batch * prompt * shard.sizes.hidden * 2), 2),
                    "wiring": wiring,
                    "ms": round(median(times), 3),
                    **spread(times),
                    "over_standard": round(baseline / median(times), 4) if baseline else None,
                }
            )
        del engines, engine
        torch.cuda.empty_cache()
        if peers:
            others.prefill(link_name, batch=batch, prompt=prompt, repeats=repeats)
    others.notes += sums_that_outlast_their_link(rows, shard.sizes.layers)
    return {
        "benchmark": "prefill", "emulated": tp > 1, "model": shard.name, "tp": tp, "prompt": prompt,
        "layers": shard.sizes.layers, "rows": rows, **others.compared(rows, "ms"), **environment(),
    }  # fmt: skip


def bench_e2e(
    *, model: str = "llama-3-70b", tp: int = 8, batches: Sequence[int] = (1,), prompt: int = 1024, new: int = 512,
    wirings: Sequence[str] = ("standard", "ladder"), links: Sequence[str] = ("24us",), repeats: int = 3, layers: int | None = None,
    shard: Shard | None = None, peers: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Prompt to last token, greedy, tokens chosen on the device: the paper's measure (tokens/s counts generated tokens)."""
    links = links_of(links, tp)
    check_cases(shard or model, tp, layers, batches, wirings, links, prompt + new + 8)
    shard = shard or Shard(model, tp, layers=layers)
    rows: list[dict[str, Any]] = []
    others = Peers(shard)
    for batch, link_name in itertools.product(batches, links):
        prompts = torch.randint(0, shard.sizes.vocab_rows, (batch, prompt), device="cuda")
        link = parse_link(link_name, tp=tp)
        baseline = None
        for wiring in sorted(wirings, key=lambda wiring: wiring != "standard"):
            engine = shard.engine(wiring, link, batch=batch, max_context=prompt + new + 8)

            def generate(engine: DecodeEngine = engine, prompts: torch.Tensor = prompts) -> None:
                tokens = engine.argmax(engine.prefill(prompts))
                for _ in range(new - 1):
                    tokens = engine.argmax(engine.decode(tokens))

            times = time_calls(generate, repeats)
            rate = batch * new * 1e3 / median(times)
            baseline = rate if wiring == "standard" else baseline
            rows.append(
                {
                    "batch": batch,
                    "link": link_name,
                    "wiring": wiring,
                    "schedule": engine.schedule,
                    "products": engine.products,
                    "seconds": round(median(times) / 1e3, 4),
                    **spread(times),
                    "tokens_per_s": round(rate, 2),
                    "over_standard": round(rate / baseline, 4) if baseline else None,
                }
            )
            del engine, generate
            torch.cuda.empty_cache()
        if peers:
            others.e2e(link_name, batch=batch, prompt=prompt, new=new, repeats=repeats)
    return {
        "benchmark": "e2e", "emulated": tp > 1, "model": shard.name, "tp": tp, "prompt": prompt, "new": new,
        "layers": shard.sizes.layers, "rows": rows, **others.compared(rows, "seconds"), **environment(),
    }  # fmt: skip


def check_cases(
    model: str | Shard, tp: int, layers: int | None, batches: Sequence[int], wirings: Sequence[str], links: Sequence[str],
    max_context: int, schedule: str = "auto", products: str = "auto",
) -> None:  # fmt: skip
    """Everything asked for, before the first weight is made: a mistake in the last case must not cost the rows before it."""
    if isinstance(model, Shard):
        spec = model.spec
    else:
        shape = resolve_model(model)[1]
        spec = EngineSpec.from_shape(replace(shape, num_layers=layers) if layers is not None else shape)
    for link in links:
        parse_link(link, tp=tp)
    for batch, wiring in itertools.product(batches, wirings):
        wired = Wiring.parse(wiring, spec.shape.num_layers)
        check_request(
            spec, wired, batch=batch, max_context=max_context, schedule=schedule, tp=tp, products=products
        )  # fmt: skip


def links_of(links: Sequence[str], tp: int) -> Sequence[str]:
    """One rank sums with nobody, whatever the link."""
    return links if tp > 1 else ("none",)


def time_in_turns(engines: Sequence[DecodeEngine], context: int, repeats: int, turns: int = 5) -> dict[int, list[float]]:
    """Milliseconds of single graph replays by ``id`` of the engine, each between its own pair of events; the context grows by one a step.
    The engines take turns: a card's speed drifts, and so it does for all of them alike."""
    taken: dict[int, list[float]] = {id(engine): [] for engine in engines}
    first = context - repeats // 2
    bounds = [first + repeats * turn // turns for turn in range(turns + 1)]
    for turn, (start, stop) in enumerate(itertools.pairwise(bounds)):
        for engine in {id(engine): engine for engine in engines}.values():
            engine.reset(start, random_context=turn == 0)
            for _ in range(3):
                engine.replay()
            engine.reset(start)
            taken[id(engine)] += time_on_device(engine.replay, stop - start)
    return taken
