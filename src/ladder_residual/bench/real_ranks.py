"""Decode, prefill and end-to-end benchmarks of the CUDA engine on real ranks: each on a GPU of its own, or several sharing one.

All wirings of a row take turns in one run, and the slowest rank counts. ``no-comm``, the bound of a standard transformer, has one
all-reduce a step, the embedding's: it keeps the ranks in step, which would otherwise fill each other's gaps where they share a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from ..common.environment import environment
from ..distributed.shared_gpu import sharing
from ..distributed.world import World
from ..engine.engine import DecodeEngine
from ..engine.ops.tiles import GemvTiles
from ..engine.random_rank import DTYPE, RandomRank
from ..engine.reducer_choice import make_reducer, time_all_reduce
from ..plan.models import resolve_model
from .engine import check_cases, generate, time_in_turns
from .timing import spread, time_calls_in_turns

REDUCERS = ("symm", "nccl")
BOUND = "no-comm"


def bench_ranks(
    phase: str,
    world: World,
    *,
    model: str,
    layers: int | None,
    batches: Sequence[int],
    wirings: Sequence[str],
    reducers: Sequence[str],
    repeats: int,
    context: int = 0,
    prompt: int = 0,
    new: int = 0,
    schedule: str = "auto",
    gemm_backend: str = "auto",
    weights: str = "bf16",
    kv_cache_dtype: str = "auto",
) -> dict[str, Any]:
    """``phase``: decode (steps at ``context``), prefill (a ``prompt``) or e2e (``prompt`` and ``new`` tokens)."""
    if world.size < 2:
        raise ValueError("real ranks reduce over each other: use --tp 2 or more, or --ranks emulated")
    for name in reducers:
        if name not in REDUCERS:
            raise ValueError(f"unknown reducer {name!r}; choose from {', '.join(REDUCERS)}")
    max_context = max(2 * context, 2048) if phase == "decode" else prompt + new + 16
    check_cases(model, world.size, layers, batches, wirings, ("none",), max_context, schedule, gemm_backend)
    everyone = list(range(world.size))
    groups = (dist.new_group(everyone), dist.new_group(everyone))
    numbers: dict[str, Any] = {"weights": weights, "kv_cache_dtype": kv_cache_dtype}
    rank = RandomRank(*resolve_model(model), world.size, layers=layers, rank=world.rank, groups=groups, **numbers)
    bandwidth = _bandwidth(world)
    names = list(dict.fromkeys(["standard", BOUND, *wirings]))
    rows: list[dict[str, Any]] = []
    for batch in batches:
        for reducer in reducers:
            sized: dict[str, Any] = {"batch": batch, "reducer": reducer}
            tokens = batch * prompt if phase == "prefill" else batch
            sized["all_reduce_us"] = round(_all_reduce_us(reducer, rank, groups, tokens), 2)
            decode: dict[str, Any] = {"schedule": schedule, "gemm_backend": gemm_backend}
            if phase == "prefill":  # what a decode step would choose does not matter there, so nothing is timed for it
                tiles = GemvTiles.candidates(rank.sizes, max_context)[0]
                decode = {"schedule": "serial", "gemm_backend": "cublas", "tiles": tiles}
            engines: dict[str, DecodeEngine] = {}
            for wiring in names:
                shared = next((engine.cache for engine in engines.values()), None)
                more = {"batch": batch, "max_context": max_context, "cache": shared, **decode}
                engines[wiring] = rank.engine(wiring, reducer=reducer, **more)
            times = _measure(phase, engines, world, repeats, context, prompt, new)
            standard, bound = (median(times[name]) for name in ("standard", BOUND))
            for wiring, engine in engines.items():
                row: dict[str, Any] = {**sized, "wiring": wiring}
                row |= {"schedule": engine.schedule, "gemm_backend": engine.gemm_backend}
                row |= {"ms": round(median(times[wiring]), 4), **spread(times[wiring])}
                row["over_standard"] = round(standard / row["ms"], 4)
                row["over_no_comm"] = round(bound / row["ms"], 4)
                if phase == "decode":
                    row["schedules_tried_ms"] = {name: round(ms, 4) for name, ms in engine.step_ms.items()}
                    floor = 1e3 * rank.bytes_per_step(batch, context) * world.ranks_per_gpu / bandwidth
                    row["roofline_share"] = round(floor / row["ms"], 4)
                if phase == "e2e":
                    row["tokens_per_s"] = round(batch * new * 1e3 / row["ms"], 2)
                rows.append(row)
            engines.clear()
            del engine
            torch.cuda.empty_cache()
    sizes = {"decode": {"context": context}, "prefill": {"prompt": prompt}, "e2e": {"prompt": prompt, "new": new}}[phase]
    return {
        "benchmark": phase,
        "ranks": "real",
        "emulated": False,
        "model": rank.name,
        "tp": world.size,
        "layers": rank.sizes.layers,
        **sizes,
        "dtype": "bfloat16",
        "weights": rank.weights_name,
        "kv_cache_dtype": rank.kv_cache_dtype,
        **sharing(world.ranks_per_gpu),
        "read_bandwidth_tb_s": round(bandwidth / 1e12, 3),
        "rows": rows,
        **environment(),
    }


def _bandwidth(world: World) -> float:
    """Bytes per second that rank 0 reads, with its share of the SMs, while the others wait outside of their GPUs."""
    from .roofline import read_bandwidth  # imports Triton

    torch.cuda.synchronize()
    return float(world.ask(lambda: str(read_bandwidth(gigabytes=2.0))))


def _all_reduce_us(reducer: str, rank: RandomRank, groups: tuple[Any, Any], tokens: int) -> float:
    where: dict[str, Any] = {"dtype": DTYPE, "device": rank.device}
    made = make_reducer(reducer, tp=rank.tp, link=None, groups=groups, **where)
    if made.name != reducer:
        raise ValueError(f"these ranks have no {reducer}: choose the other of --reducers {','.join(REDUCERS)}")
    return time_all_reduce(made, groups[0], tokens, rank.sizes.hidden, **where)


def _measure(
    phase: str, engines: Mapping[str, DecodeEngine], world: World, repeats: int, context: int, prompt: int, new: int
) -> dict[str, list[float]]:
    """Milliseconds by wiring, of the slowest rank."""
    if phase == "decode":
        times = time_in_turns([*engines.values()], context, repeats, world=world)
        return {wiring: times[id(engine)] for wiring, engine in engines.items()}
    calls: dict[str, Callable[[], object]] = {}
    for wiring, engine in engines.items():
        prompts = _prompts(engine, prompt)
        calls[wiring] = partial(engine.prefill, prompts) if phase == "prefill" else partial(generate, engine, prompts, new)
    return time_calls_in_turns(calls, repeats, world)


def _prompts(engine: DecodeEngine, prompt: int) -> torch.Tensor:
    """The same on every rank."""
    generator = torch.Generator(engine.device).manual_seed(0)
    limit = engine.spec.shape.vocab_size
    return torch.randint(0, limit, (engine.batch, prompt), generator=generator, device=engine.device)
