"""The public engine: static cache, one CUDA graph per step, the schedule that is fastest here.

>>> engine = DecodeEngine(spec, Wiring.parse("ladder", 80), weights, tp=8, rank=0, reducer="emulated",
...                       link=parse_link("24us"), batch=1, max_context=2048)            # doctest: +SKIP
>>> logits = engine.prefill(input_ids, lengths)                                          # doctest: +SKIP
>>> logits = engine.decode(engine.gather(logits).argmax(-1))                             # doctest: +SKIP
"""

from __future__ import annotations

import gc
import time
import warnings
from collections.abc import Mapping
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..candidates import Candidates, best_of_ranks, decisive_logits
from ..config import Wiring
from ..memory import require
from ..sharding import split
from .cache import KVCache
from .emulate import Link
from .execute import RING, Executor, Ops
from .gemm_ops import GemmOps
from .gemv_ops import GemvOps, GemvTiles
from .graph_edges import can_change_edges, wait_for_joined
from .launcher import EARLY
from .multiprocessors import hopper, products_leave, shared_memory
from .prefill_ops import FusedPrefillOps, PrefillOps
from .reducers import NcclReducer, make_reducer
from .row_ops import BATCHES, RowOps, RowTiles
from .schedule import Plan, plan_steps, schedules_of
from .spec import EngineSpec, RankSizes
from .streams import CudaStreams
from .weights import RankWeights, stack_weights

DTYPES = (torch.bfloat16, torch.float16)
EXACT = torch.float32  # for comparisons that must not hang on rounding; the kernels are made for two bytes a weight
MAX_BATCH = 256
# Of batches 2 to 16: cuBLAS, kernels of our own, or what is faster at start-up.
PRODUCTS = ("cublas", "triton", "auto")
Tiles = GemvTiles | RowTiles | None  # None: cuBLAS


class DecodeEngine:
    """A rank of a Llama-shaped decoder on one GPU. ``logits`` it returns are this rank's rows of the vocabulary (all of them
    with tp=1), valid until the next call; ``gather`` and ``argmax`` bring the ranks together."""

    prompt_ops: type[PrefillOps] = FusedPrefillOps

    def __init__(
        self, spec: EngineSpec, wiring: Wiring, weights: Mapping[str, Tensor] | RankWeights, *, tp: int = 1, rank: int = 0,
        reducer: str = "none", link: Link | None = None, groups: tuple[Any, Any] | None = None, batch: int = 1,
        max_context: int = 2048, schedule: str = "auto", products: str = "auto", pdl: int = 1, tiles: GemvTiles | None = None,
        release: bool = False, cache: KVCache | None = None,
        stream_priorities: tuple[int, int] | None = None, leave_multiprocessors: int | None = None,
    ) -> None:  # fmt: skip
        began = time.perf_counter()
        sizes = {"batch": batch, "max_context": max_context, "tp": tp, "rank": rank}
        check_request(spec, wiring, **sizes, schedule=schedule, products=products)
        if pdl not in EARLY:
            raise ValueError(f"pdl {pdl!r:.20} is none of {', '.join(map(str, EARLY))}: use 1, or 0 without early launches")
        self.spec, self.wiring, self.batch, self.max_context = spec, wiring, batch, max_context
        self.sizes = RankSizes.of(spec.shape, tp, rank)
        self.weights = (
            weights if isinstance(weights, RankWeights) else stack_weights(spec, self.sizes, weights, release=release)
        )
        self.device = self.weights.device
        check_weights(self.weights.dtype, self.device, exact=True)
        if products == "triton" and self.weights.dtype == EXACT:
            raise ValueError(f"products of our own run bfloat16 or float16, not {EXACT}: use products='cublas'")
        self.reducer = make_reducer(reducer, tp=tp, link=link, groups=groups, dtype=self.weights.dtype, device=self.device)
        self._groups = groups
        self._leave = leave_multiprocessors
        if cache is None:
            require_memory(self.sizes, self.weights.dtype, self.device, batch=batch, max_context=max_context)
        elif (cache.batch, cache.max_context) != (batch, max_context):
            raise ValueError(
                f"the cache is for batch {cache.batch} and context {cache.max_context}, not {batch} and {max_context}"
            )
        with torch.cuda.device(self.device):
            self.cache = cache or KVCache(spec, self.sizes, batch, max_context, self.weights.dtype, self.device)
            self._pdl, self._tiles, self._priorities = pdl if hopper(self.device) else 0, tiles, stream_priorities
            self._reads_before = self._all_ranks(can_change_edges())
            self._tokens = torch.zeros(batch, dtype=torch.int64, device=self.device)
            self._logits = torch.full(
                (batch, self.sizes.vocab_rows), float("nan"), dtype=self.weights.dtype, device=self.device
            )
            self.step_ms: dict[str, float] = {}  # measured at start-up, by schedule
            self._length = 0  # of the longest sequence; the device counts for itself
            self._choose(schedule, products)
            self.schedule, self.lanes = self._executing.plan.schedule, self._executing.plan.lanes
        self.startup_seconds = time.perf_counter() - began

    # ---- use -------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def prefill(self, input_ids: Tensor, lengths: Tensor | None = None) -> Tensor:
        """(B, S) prompts padded on the right -> logits (B, vocabulary rows) after each prompt's last token."""
        batch, steps = input_ids.shape
        self._check_batch(batch)
        if steps > self.max_context:
            raise ValueError(f"a prompt of {steps} tokens does not fit max_context={self.max_context}")
        lengths = torch.full((batch,), steps) if lengths is None else lengths.cpu()
        if lengths.shape != (batch,) or int(lengths.min()) < 1 or int(lengths.max()) > steps:
            raise ValueError(f"lengths must be {batch} numbers from 1 to {steps}, got {lengths.tolist()}")
        apart = self.reducer.name == "emulated"  # the others sum a message where it lies
        need = prefill_bytes(self.sizes, batch * steps, self._logits.element_size(), sums_apart=apart)
        require(
            need, self.device, f"reading {batch} prompts of {steps} tokens at once", "lower the batch or shorten the prompts"
        )
        ops = self.prompt_ops(self.spec, self.sizes, self.weights, self.cache, steps)
        ops.last = (torch.arange(batch) * steps + lengths - 1).to(self.device)
        executor = self._executor(plan_steps(self.wiring), ops, rows=batch * steps, prefill=True)
        with torch.cuda.device(self.device), products_leave(self._leave_beside(executor), self.device):
            executor.run(input_ids.to(self.device), self._logits)
        self.cache.set_lengths(lengths.to(self.device))
        self._length = int(lengths.max())
        return self._logits

    @torch.no_grad()
    def decode(self, tokens: Tensor) -> Tensor:
        """(B) new tokens -> logits (B, vocabulary rows)."""
        self._check_batch(tokens.shape[0])
        self._tokens.copy_(tokens)
        self.replay()
        return self._logits

    def gather(self, logits: Tensor) -> Tensor:
        """The whole vocabulary on every rank (an emulated rank has only its own rows)."""
        if self._groups is None:
            return logits[:, : self.sizes.vocab_tokens]
        shards = [split(self.spec.shape.vocab_size, self.sizes.tp, rank) for rank in range(self.sizes.tp)]
        parts = self._concatenate(logits).split(self.sizes.vocab_rows, dim=-1)
        return torch.cat([part[:, : stop - start] for part, (start, stop) in zip(parts, shards, strict=True)], dim=-1)

    def decisive(self, logits: Tensor, needed: Candidates) -> Tensor:
        """Logits of the whole vocabulary, minus infinity where they cannot matter; ``gather`` where few do not decide."""
        if self.sizes.tp > 1 and self._groups is not None:
            own, first, size = logits[:, : self.sizes.vocab_tokens], self.sizes.vocab_first, self.spec.shape.vocab_size
            few = decisive_logits(own, first, size, self.sizes.tp, needed, self._concatenate)
            if few is not None:
                return few
        return self.gather(logits)

    def argmax(self, logits: Tensor) -> Tensor:
        """Greedy choice over all ranks from one (value, token) pair a rank, without gathering the vocabulary."""
        own = logits[:, : self.sizes.vocab_tokens]
        values, tokens = best_of_ranks(own, self.sizes.vocab_first, 1, self._concatenate)
        winner = values[..., 0].argmax(dim=-1, keepdim=True)
        return tokens[..., 0].gather(-1, winner)[:, 0]

    def _concatenate(self, local: Tensor) -> Tensor:
        """The ranks' tensors side by side; an emulated rank has no others."""
        if self._groups is None:
            return local
        parts = [torch.empty_like(local) for _ in range(self.sizes.tp)]
        dist.all_gather(parts, local.contiguous(), group=self._groups[0])
        return torch.cat(parts, dim=-1)

    def reset(self, length: int = 0, *, random_context: bool = False) -> None:
        """Forget the context, or pretend one of ``length`` random tokens (benchmarks)."""
        if not 0 <= length < self.max_context:
            raise ValueError(f"a context of {length} leaves no room in max_context={self.max_context}")
        if random_context:
            self.cache.fill(length)
        self.cache.positions.fill_(length)
        self._length = length

    def replay(self) -> None:
        """One more step on the tokens already there: what a benchmark times."""
        if self._length >= self.max_context:
            raise ValueError(f"the cache is full: {self._length} of max_context={self.max_context} tokens")
        self._graph.replay()
        self._length += 1

    @property
    def products(self) -> str:
        """What multiplies by the weights in a decode step."""
        return "cublas" if self.tiles is None else "triton"

    @property
    def sums_of(self) -> list[int]:
        """The layer of each sum of a step, in the order they are started."""
        return [step.layer for step in self._executing.plan.steps if step.reduce]

    # ---- making ----------------------------------------------------------------------------------------------------

    def _ops(self, tiles: Tiles) -> Ops:
        if isinstance(tiles, RowTiles):
            return RowOps(self.spec, self.sizes, self.weights, self.cache, tiles, pdl=self._pdl)
        if tiles is not None:
            before = self._reads_before
            return GemvOps(self.spec, self.sizes, self.weights, self.cache, tiles, pdl=self._pdl, reads_before=before)
        return GemmOps(self.spec, self.sizes, self.weights, self.cache, pdl=self._pdl)

    def _executor(self, plan: Plan, ops: Ops, rows: int, *, prefill: bool = False) -> Executor:
        reducer = self.reducer
        if prefill and reducer.name == "symm":  # symmetric buffers are set up with all ranks: not for every new prompt length
            assert self._groups is not None
            reducer = NcclReducer(self._groups)
        # Sums go first when a multiprocessor frees up: a matrix product leaves them none until it ends, nor does a kernel that was
        # launched early and waits. And down, launched before the output product beside it, would leave that none until it is through
        # itself: then attention's sum and the next layer are late, and so is the output product there. (Gate/up must be on the card
        # by then, or the output product would keep it out: it is if nothing holds its launch up.)
        early = reducer.silent or (ops.early_sums and reducer.early)
        woven = plan.skips and ops.reads_before and early and self._pdl
        priorities = self._priorities or (-2 if woven else 0, -5)
        return Executor(
            plan, ops, reducer, CudaStreams(self.device, priorities=priorities), rows=rows, hidden=self.sizes.hidden,
            tp=self.sizes.tp, dtype=self.weights.dtype, device=self.device,
        )  # fmt: skip

    def _choose(self, schedule: str, products: str) -> None:
        """Capture every candidate (schedule and tiles), time each where there is a choice, and keep the fastest."""
        schedules = list(schedules_of(self.wiring)) if schedule == "auto" else [schedule]
        tiles: list[Tiles] = [None]
        if self.batch == 1:
            room = shared_memory(self.device)
            made = GemvTiles.candidates(self.sizes, self.max_context, self.weights.dtype.itemsize, room)
            tiles = [self._tiles] if self._tiles else [*made]
        elif products != "cublas" and self.batch in BATCHES and self.weights.dtype != EXACT:
            tiles = [*([None] if products == "auto" else []), *RowTiles.candidates(self.sizes)]
        gc.collect()  # an old engine's graph that is freed during a capture would spoil it
        best: float | None = None
        tried = [(name, candidate) for name in schedules for candidate in tiles if self._made_for(candidate, name)]
        if len(tried) > 1:
            self.reset(min(1024, self.max_context // 2), random_context=True)
            context = self._length
        for name, candidate in tried:
            graph, executor = self._capture(plan_steps(self.wiring, name), candidate)
            if len(tried) > 1:
                time_ms = self._slowest_rank(median(self._time_steps(graph, context)))
                self.step_ms[name] = min(time_ms, self.step_ms.get(name, time_ms))
            else:
                time_ms = 0.0
            if best is None or time_ms < best:
                best = time_ms
                # the executor owns the buffers that the graph writes to
                self._graph, self._executing, self.tiles = graph, executor, candidate
        self.reset()

    def _made_for(self, tiles: Tiles, schedule: str) -> bool:
        return self._tiles is not None or not isinstance(tiles, GemvTiles) or schedule in tiles.schedules

    def _slowest_rank(self, time_ms: float) -> float:
        """Ranks must choose alike: different schedules would issue their collectives in different orders and hang."""
        if self.sizes.tp == 1 or self._groups is None:
            return time_ms
        slowest = torch.tensor([time_ms], device=self.device)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=self._groups[0])
        return float(slowest)

    def _all_ranks(self, agree: bool) -> bool:
        """A rank that captured a step once more on its own would wait for the others' sums forever."""
        return self._slowest_rank(float(not agree)) == 0

    def _time_steps(self, graph: torch.cuda.CUDAGraph, context: int, repeats: int = 32) -> list[float]:
        times = []
        for _ in range(repeats):
            self.cache.positions.fill_(context)  # a replay moves on by one: never past the end of a short cache
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
        return times[2:]

    def _capture(self, plan: Plan, tiles: Tiles) -> tuple[torch.cuda.CUDAGraph, Executor]:
        from .kernels_small import step_positions

        executor = self._executor(plan, self._ops(tiles), rows=self.batch)
        pad = 1 << (self.batch - 1).bit_length()

        def step() -> None:
            executor.run(self._tokens, self._logits)
            step_positions[(1,)](self.cache.positions, self.batch, BLOCK=pad, num_warps=1)

        side = torch.cuda.Stream(self.device)
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(side), torch.no_grad():
            step()  # compiles every kernel and sets up cuBLAS before capture
        torch.cuda.current_stream(self.device).wait_stream(side)
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        with torch.no_grad(), torch.cuda.graph(graph):
            step()
        if executor.reads_before:
            line = executor.ops.launchers[0]
            found = wait_for_joined(graph, line.started, executor.beside, line.behind, executor.early_sums)
            if not self._all_ranks(found):
                warnings.warn(
                    "kernels of the captured step were not found again: a woven line waits before it reads", stacklevel=2
                )
                self._reads_before = False
                return self._capture(plan, tiles)
        graph.instantiate()
        self.cache.positions.zero_()
        return graph, executor

    def _leave_beside(self, executor: Executor) -> int:
        """Multiprocessors that a prompt's products leave to a sum: none unless some run at the same time. (Products of a decode
        step are bound by memory and end on time either way: measured, no gain.)"""
        plan, asked = executor.plan, self._leave
        beside = plan.lanes == 1 and any(step.reduce and plan.in_flight(step) for step in plan.steps)
        return (executor.reducer.multiprocessors if asked is None else asked) if beside else 0

    def _check_batch(self, batch: int) -> None:
        if batch != self.batch:
            raise ValueError(f"this engine's graph is for batch {self.batch}, got {batch}: make an engine for that batch")


def check_request(
    spec: EngineSpec,
    wiring: Wiring,
    *,
    batch: int,
    max_context: int,
    schedule: str,
    tp: int,
    rank: int = 0,
    products: str = "auto",
) -> None:
    """Everything that can be refused before a byte is allocated."""
    RankSizes.of(spec.shape, tp, rank)
    if wiring.num_layers != spec.shape.num_layers:
        raise ValueError(f"the wiring is for {wiring.num_layers} layers, the model has {spec.shape.num_layers}")
    wiring.check_tp(tp)
    if not 1 <= batch <= MAX_BATCH:
        raise ValueError(f"batch {batch} is outside 1 to {MAX_BATCH}")
    if not 2 <= max_context <= 1 << 20:
        raise ValueError(f"max_context {max_context} is outside 2 to {1 << 20}")
    if products not in PRODUCTS:
        raise ValueError(f"unknown products {products!r}; choose from {', '.join(PRODUCTS)}")
    plan_steps(wiring, "one" if schedule == "auto" else schedule)


def check_weights(dtype: torch.dtype, device: torch.device, *, exact: bool = False) -> None:
    if device.type != "cuda":
        raise ValueError(f"the CUDA engine needs weights on a GPU, they are on {device}: use the slow path")
    if dtype not in DTYPES and not (exact and dtype == EXACT):
        asked = ", or --engine cuda to compare" if dtype == EXACT else ""
        raise ValueError(f"the CUDA engine runs bfloat16 or float16, not {dtype}: use --dtype bfloat16{asked}")


def require_memory(sizes: RankSizes, dtype: torch.dtype, device: torch.device, *, batch: int, max_context: int) -> None:
    """The weights are there already; the cache must fit beside them."""
    need = sizes.cache_bytes(dtype.itemsize, batch, max_context)
    need += 40 * batch * sizes.hidden * 4 + 2 * max_context * sizes.head_dim * 4
    require(need, device, f"the KV cache of batch {batch} at context {max_context}", "lower the batch or the context")


def prefill_bytes(sizes: RankSizes, rows: int, element: int, *, sums_apart: bool) -> int:
    """What reading ``rows`` tokens holds at once: messages (and their sums), the stream, and the widest module's vectors."""
    messages = (2 if sums_apart else 1) * (RING + 1) * sizes.hidden * element
    streams = 2 * sizes.hidden * 4 + sizes.hidden * element  # two buffers in float32, and what the norm makes of one
    mlp = 3 * sizes.intermediate * element
    attention = (sizes.qkv_width + 2 * sizes.heads * sizes.head_dim) * element
    return rows * (messages + streams + max(mlp, attention, 2 * sizes.hidden * element))
