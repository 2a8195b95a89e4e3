"""Training steps under tensor parallelism: how much of the link each wiring hides, forward and backward.

On CPUs: real ranks over this host's link, each all-reduce made to last as long as asked. On GPUs: real ranks over NCCL, or one rank of
``tp`` that holds its shard of the model and runs real forward and backward passes; an all-reduce is then a copy on another stream that
lasts as long as the emulated link says. All wirings are measured in one run on the same weights, interleaved.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..common.environment import environment
from ..common.units import read_seconds
from ..core.config import Wiring
from ..core.reduce import GroupReducer, Reducer, ReduceWork
from ..distributed.shared_gpu import sharing
from ..distributed.world import EmulatedRank, Rank, World
from ..generation.decode_loop import synchronize
from ..links import Link, parse_link
from ..models.hf import place_layers
from ..models.loading import DTYPES, set_reducers
from ..models.presets import ModelShape
from ..models.random_weights import random_model
from ..train.compile import compile_layers
from ..train.gradients import finish_gradients
from ..train.loss import chunked_cross_entropy, head_of
from .overlap import COMPUTE
from .timing import quartiles

PROGRAMS = 24  # of the copy that stands for an all-reduce: about as many SMs as NCCL takes for large messages


class _EmulatedHandle(ReduceWork):
    def __init__(self, message: Tensor, total: Tensor, done: torch.cuda.Event) -> None:
        self.message, self.total, self.done = message, total, done  # kept until the copy is done: another stream uses them

    def wait(self) -> Tensor:
        torch.cuda.current_stream().wait_event(self.done)
        return self.total


class EmulatedRankReducer(GroupReducer):
    """One rank of ``size`` on a GPU that has no peers: an all-reduce returns its own partial, after the time the link takes."""

    def __init__(self, size: int, link: Link, device: torch.device) -> None:
        self.size, self.rank, self.link = size, 0, link
        self.stream = torch.cuda.Stream(device, priority=-1)

    def launch(self, partial: Tensor) -> ReduceWork:
        from ..engine.cuda.pdl import PdlMode
        from ..engine.kernels.elementwise import timed_copy

        message = partial.contiguous()
        total = torch.empty_like(message)
        nanoseconds = round(1000 * self.link.us(message.numel() * message.element_size(), self.size))
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            timed_copy[(PROGRAMS,)](message, total, message.numel(), nanoseconds, BLOCK=4096, PDL=PdlMode.OFF, num_warps=16)
            done = torch.cuda.Event()
            done.record()
        return _EmulatedHandle(message, total, done)

    def gather(self, local: Tensor) -> Tensor:
        return torch.cat([local] * self.size, dim=-1)


class SilentReducer(Reducer):
    """As many ranks, no communication: the bound."""

    def __init__(self, size: int) -> None:
        self.size = size

    def gather(self, local: Tensor) -> Tensor:
        return torch.cat([local] * self.size, dim=-1)


class _Step:
    """Forward, loss and backward of one batch; the optimizer is the same for every wiring and left out."""

    def __init__(self, model: Any, batch: int, sequence: int, world: World, compiled: bool) -> None:
        self.model, self.world, self.compiled = model, world, compiled
        generator = torch.Generator().manual_seed(0)
        self.tokens = torch.randint(0, model.config.vocab_size, (batch, sequence), generator=generator).to(world.device)

    def rewire(self, spec: str, reducer: Reducer) -> None:
        self.model.config.wiring = Wiring.parse(spec, self.model.config.num_hidden_layers).spec
        place_layers(self.model)
        set_reducers(self.model, reducer)

    def __call__(self, *, complete: bool) -> tuple[float, float]:
        """Seconds of forward and backward."""
        device = self.world.device
        self.model.zero_grad(set_to_none=True)
        synchronize(device)
        started = time.perf_counter()
        hidden = self.model.base_model(self.tokens, use_cache=False).last_hidden_state
        loss = chunked_cross_entropy(hidden, head_of(self.model), self.tokens, compiled=self.compiled).total
        synchronize(device)
        between = time.perf_counter()
        loss.backward()
        if complete:
            finish_gradients(self.model, self.world)
        synchronize(device)
        return between - started, time.perf_counter() - between


def bench_train(
    world: World,
    *,
    model: str,
    layers: int | None,
    tp: int,
    batch: int,
    sequence: int,
    wirings: list[str],
    links: list[str],
    repeats: int,
    dtype: str = "float32",
    compiled: bool = False,
    vocabulary: int | None = None,
) -> dict[str, Any]:
    """``links``: latencies on CPU ranks (``1ms``), emulated links for one rank on a GPU (``500us``), ``none`` for several."""
    if repeats < 3:
        raise ValueError(f"repeats must be at least 3 to say anything about spread, got {repeats}")
    if "parallel" in wirings:
        raise ValueError("parallel needs weights of its own; here all wirings share one model: leave it out")
    shape = ModelShape.from_name(model)
    shape = replace(shape, num_layers=layers or shape.num_layers, vocab_size=vocabulary or shape.vocab_size)
    emulated = world.device.type == "cuda" and world.size == 1
    place: Rank = EmulatedRank(tp, device=world.device) if emulated else world
    if place.size < 2:
        raise ValueError("there is nothing to hide on one rank: run with --tp 2 or more")
    built = random_model(shape, place, DTYPES[dtype], reducer=SilentReducer(place.size)).train()
    if compiled:
        compile_layers(built)
    step = _Step(built, batch, sequence, world, compiled)
    rows = []
    for link in links:
        make, title = _reducer_for(link, world, place.size, emulated)
        rows += [{"link": title, **row} for row in _measure(step, make, wirings, repeats, world, place.size, emulated)]
    size = batch * sequence * shape.hidden_size * DTYPES[dtype].itemsize
    return {
        "benchmark": "train",
        "model": model,
        "layers": shape.num_layers,
        "vocabulary": shape.vocab_size,
        "tp": place.size,
        "emulated": emulated,
        **(sharing(world.ranks_per_gpu) if world.device.type == "cuda" else {}),
        "batch": batch,
        "sequence": sequence,
        "dtype": dtype,
        "compiled": compiled,
        "message_bytes": size,
        "all_reduces_per_pass": 2 * shape.num_layers + 1,
        "repeats": repeats,
        "rows": rows,
        **({"device": torch.cuda.get_device_name(world.device)} if world.device.type == "cuda" else {}),
        **environment(),
    }


def _reducer_for(link: str, world: World, size: int, emulated: bool) -> tuple[Callable[[], Reducer], str]:
    if emulated:
        parsed = parse_link(link, tp=size)
        return (lambda: EmulatedRankReducer(size, parsed, world.device)), f"emulated {parsed.name}"
    seconds = read_seconds(link)
    if seconds is None:
        raise ValueError("bench train needs a latency such as 1ms; auto is for decode steps")
    if seconds and world.device.type == "cuda":
        raise ValueError(f"ranks on GPUs reduce over their own link: leave out --links {link}")
    title = (
        f"this host's link + {1e3 * seconds:g} ms emulated latency per all-reduce" if seconds else "this host's link as it is"
    )
    return (lambda: world.reducer("async", latency=seconds)), title


def _measure(
    step: _Step, make: Callable[[], Reducer], wirings: list[str], repeats: int, world: World, size: int, emulated: bool
) -> list[dict[str, Any]]:
    names = list(dict.fromkeys(["standard", *wirings, COMPUTE]))
    reducers = {spec: SilentReducer(size) if spec == COMPUTE else make() for spec in names}
    times: dict[str, list[tuple[float, float]]] = {spec: [] for spec in names}
    for turn in range(repeats + 2):
        for spec in names:
            # Without communication the order of computing is that of standard.
            step.rewire("standard" if spec == COMPUTE else spec, reducers[spec])
            if not emulated:
                world.barrier()
            seconds = step(complete=not emulated and spec != COMPUTE)
            if turn >= 2:  # the first ones warm up and compile
                times[spec].append(seconds)
    rows: list[dict[str, Any]] = []
    whole = {spec: world.slowest([sum(pair) for pair in pairs]) for spec, pairs in times.items()}
    standard, compute = (statistics.median(whole[spec]) for spec in ("standard", COMPUTE))
    for spec in names:
        forward, backward = (world.slowest([pair[part] for pair in times[spec]]) for part in (0, 1))
        median = statistics.median(whole[spec])
        exposed = standard - compute
        rows.append(
            {
                "wiring": spec,
                **quartiles(whole[spec]),
                "forward_ms": 1e3 * statistics.median(forward),
                "backward_ms": 1e3 * statistics.median(backward),
                "tokens_per_s": step.tokens.numel() / median,
                "speedup": standard / median,
                "hidden_percent": 100 * (standard - median) / exposed if exposed > 0 else None,
            }
        )
    return rows
