"""The public engine: static cache, one CUDA graph per decode step, the schedule and tiles that are fastest on this GPU.

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

from ..common.memory import require
from ..core.config import Wiring
from ..links import Link
from ..models.candidates import Candidates, best_of_ranks, decisive_logits
from ..models.sharding import split
from .cache import KVCache
from .checks import EXACT_DTYPE, check_kv_cache, check_request, check_weights, prefill_bytes, require_memory
from .cuda.cublas import reserve_sms
from .cuda.device import is_hopper, max_shared_memory, sm_count
from .cuda.graph_edges import can_edit_edges, order_side_streams
from .cuda.pdl import ENGINE_MODES, PdlMode
from .cuda.streams import CudaStreams
from .cuda.timing import time_on_device
from .executor import Executor, Ops
from .ops.gemm import GemmOps
from .ops.gemv import GemvOps
from .ops.prefill import FusedPrefillOps, PrefillOps
from .ops.small_batch import BATCHES, SmallBatchOps
from .ops.tiles import GemvTiles, SmallBatchTiles, next_power_of_2
from .quantized import Weight
from .reducer_choice import choose_reducers, has_nccl
from .reducers import SymmetricPromptReducer
from .schedule import Plan, available_schedules, plan_steps
from .spec import EngineSpec, RankSizes
from .weights import RankWeights, stack_weights

Tiles = GemvTiles | SmallBatchTiles | None  # None: cuBLAS


class DecodeEngine:
    """One rank of a Llama-shaped decoder on one GPU. The logits it returns are this rank's rows of the vocabulary (all of them with
    tp=1), valid until the next call; ``gather`` and ``argmax`` combine the ranks."""

    prefill_ops: type[PrefillOps] = FusedPrefillOps

    def __init__(
        self, spec: EngineSpec, wiring: Wiring, weights: Mapping[str, Weight] | RankWeights, *, tp: int = 1, rank: int = 0,
        reducer: str = "none", link: Link | None = None, groups: tuple[Any, Any] | None = None, batch: int = 1,
        max_context: int = 2048, schedule: str = "auto", gemm_backend: str = "auto",
        pdl: int = PdlMode.TRIGGER_THEN_WAIT, tiles: GemvTiles | None = None, release: bool = False,
        kv_cache_dtype: str = "auto", cache: KVCache | None = None, stream_priorities: tuple[int, int] | None = None,
        reserved_sms: int | None = None,
    ) -> None:  # fmt: skip
        """``groups``: two process groups of all ranks, for all-reduces that run at the same time. ``release`` frees ``weights`` as they are
        stacked. ``tiles``, ``stream_priorities`` (attention, all-reduce) and ``reserved_sms`` (for all-reduces during prefill) override
        what the engine would choose."""
        began = time.perf_counter()
        sizes = {"batch": batch, "max_context": max_context, "tp": tp, "rank": rank}
        check_request(spec, wiring, **sizes, schedule=schedule, gemm_backend=gemm_backend)
        if pdl not in ENGINE_MODES:
            choices = ", ".join(f"{mode.name} ({mode})" for mode in ENGINE_MODES)
            raise ValueError(f"pdl={pdl!r:.20} is not a mode of all kernels; choose from {choices}")
        self.spec, self.wiring, self.batch, self.max_context = spec, wiring, batch, max_context
        self.sizes = RankSizes.of(spec.shape, tp, rank)
        self.weights = (
            weights if isinstance(weights, RankWeights) else stack_weights(spec, self.sizes, weights, release=release)
        )
        self.device, self._dtype = self.weights.device, self.weights.dtype
        check_weights(self._dtype, self.device, exact=True)
        check_kv_cache(kv_cache_dtype, self.device)
        if gemm_backend == "triton" and self._dtype == EXACT_DTYPE:
            raise ValueError(f"the Triton GEMM runs bfloat16 or float16, not {EXACT_DTYPE}: use gemm_backend='cublas'")
        message: dict[str, Any] = {"batch": batch, "hidden": self.sizes.hidden, "dtype": self._dtype, "device": self.device}
        self.reducer, self._prompt_reducer, self.all_reduce_us = choose_reducers(
            reducer, tp=tp, link=link, groups=groups, **message
        )
        # Without other ranks' partials to wait for, delayed is standard.
        alone = self.reducer.is_noop and wiring.kind == "delayed"
        self._planned = Wiring.parse("standard", wiring.num_layers) if alone else wiring
        self._groups = groups
        if cache is None:
            asked: dict[str, Any] = {"batch": batch, "max_context": max_context, "kv_cache_dtype": kv_cache_dtype}
            require_memory(self.sizes, self._dtype, self.device, **asked)
        elif (cache.batch, cache.max_context, cache.kind) != (batch, max_context, kv_cache_dtype):
            raise ValueError(
                f"the cache is for batch {cache.batch}, context {cache.max_context} and kv_cache_dtype {cache.kind}, not {batch}, "
                f"{max_context} and {kv_cache_dtype}"
            )
        self._pdl = PdlMode(pdl) if is_hopper(self.device) else PdlMode.OFF
        self._tiles, self._priorities, self._reserved_sms = tiles, stream_priorities, reserved_sms
        with torch.cuda.device(self.device):
            self.cache = cache or KVCache(spec, self.sizes, batch, max_context, self._dtype, self.device, kv_cache_dtype)
            self._reads_before_wait = self._all_ranks(can_edit_edges())
            self._tokens = torch.zeros(batch, dtype=torch.int64, device=self.device)
            self._logits = torch.full((batch, self.sizes.vocab_rows), float("nan"), dtype=self._dtype, device=self.device)
            self._length = 0  # of the longest sequence; the GPU counts for itself
            self.step_ms: dict[str, float] = {}  # measured at start-up, by schedule
            self._choose(schedule, gemm_backend)
        self.schedule, self.num_chains = self._executor.plan.schedule, self._executor.plan.num_chains
        self.startup_seconds = time.perf_counter() - began

    # ---- generation ------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def prefill(self, input_ids: Tensor, lengths: Tensor | None = None) -> Tensor:
        """(B, S) prompts padded on the right -> logits (B, vocabulary rows) after each prompt's last token."""
        batch, longest = input_ids.shape
        self._check_batch(batch)
        if longest > self.max_context:
            raise ValueError(f"a prompt of {longest} tokens does not fit max_context={self.max_context}")
        lengths = torch.full((batch,), longest) if lengths is None else lengths.cpu()
        if lengths.shape != (batch,) or int(lengths.min()) < 1 or int(lengths.max()) > longest:
            raise ValueError(f"lengths must be {batch} numbers from 1 to {longest}, got {lengths.tolist()}")
        need = prefill_bytes(
            self.sizes, batch * longest, self._dtype.itemsize,
            in_place=self.reducer.name != "emulated" and self._planned.kind != "delayed",
        )  # fmt: skip
        if isinstance(self._prompt_reducer, SymmetricPromptReducer):
            need = max(0, need - self._prompt_reducer.kept_bytes)
        what = f"reading {batch} prompts of {longest} tokens at once"
        require(need, self.device, what, "lower the batch or shorten the prompts")
        ops = self.prefill_ops(self.spec, self.sizes, self.weights, self.cache, longest)
        ops.last = (torch.arange(batch) * longest + lengths - 1).to(self.device)
        executor = self._make_executor(plan_steps(self._planned), ops, rows=batch * longest, prefill=True)
        with torch.cuda.device(self.device), reserve_sms(self._sms_beside_gemms(executor), self.device):
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

    def replay(self) -> None:
        """One more step on the tokens of the last one: what a benchmark times."""
        if self._length >= self.max_context:
            raise ValueError(f"the cache is full: {self._length} of max_context={self.max_context} tokens")
        self._graph.replay()
        self._length += 1

    def reset(self, length: int = 0, *, random_context: bool = False) -> None:
        """Forget the context, or pretend one of ``length`` random tokens (benchmarks)."""
        if not 0 <= length < self.max_context:
            raise ValueError(f"a context of {length} leaves no room in max_context={self.max_context}")
        if random_context:
            self.cache.fill(length)
        self.cache.positions.fill_(length)
        self._length = length

    def gather(self, logits: Tensor) -> Tensor:
        """The whole vocabulary on every rank (an emulated rank has only its own rows)."""
        if self._groups is None:
            return logits[:, : self.sizes.vocab_tokens]
        shards = [split(self.spec.shape.vocab_size, self.sizes.tp, rank) for rank in range(self.sizes.tp)]
        parts = self._concatenate(logits).split(self.sizes.vocab_rows, dim=-1)
        return torch.cat([part[:, : stop - start] for part, (start, stop) in zip(parts, shards, strict=True)], dim=-1)

    def decisive(self, logits: Tensor, needed: Candidates) -> Tensor:
        """Logits of the whole vocabulary, minus infinity where they cannot matter; ``gather`` where a few do not decide."""
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

    @property
    def gemm_backend(self) -> str:
        """What multiplies by the weights in a decode step: ``triton`` (always, with one sequence) or ``cublas``."""
        return "cublas" if self.tiles is None else "triton"

    @property
    def all_reduce_layers(self) -> list[int]:
        """The layer of each all-reduce of a step, in the order they are started."""
        return [step.layer for step in self._executor.plan.steps if step.reduce]

    def _concatenate(self, local: Tensor) -> Tensor:
        """The ranks' tensors side by side; an emulated rank has no others."""
        if self._groups is None:
            return local
        local = local.contiguous() if has_nccl(self._groups[0]) else local.cpu()
        parts = [torch.empty_like(local) for _ in range(self.sizes.tp)]
        dist.all_gather(parts, local, group=self._groups[0])
        return torch.cat(parts, dim=-1).to(self.device)

    def _sms_beside_gemms(self, executor: Executor) -> int:
        """SMs that a prompt's GEMMs leave to an all-reduce: none unless some run at the same time. (GEMMs of a decode step are bound by
        memory and end on time either way: measured, no gain.)"""
        plan, asked = executor.plan, self._reserved_sms
        beside = plan.num_chains == 1 and any(step.reduce and plan.overlaps(step) for step in plan.steps)
        few = min(executor.reducer.sm_count, sm_count(self.device) // 8)  # a rank that shares its GPU has few to give
        return (few if asked is None else asked) if beside else 0

    def _check_batch(self, batch: int) -> None:
        if batch != self.batch:
            raise ValueError(f"this engine's graph is for batch {self.batch}, got {batch}: make an engine for that batch")

    # ---- start-up: capture the candidates, time them, keep the fastest ---------------------------------------------

    def _choose(self, schedule: str, gemm_backend: str) -> None:
        schedules = available_schedules(self._planned) if schedule == "auto" else (schedule,)
        tiles = self._candidate_tiles(gemm_backend)
        gc.collect()  # an old engine's graph that is freed during a capture would invalidate it
        candidates = [(name, tile_set) for name in schedules for tile_set in tiles if self._is_for(tile_set, name)]
        if len(candidates) > 1:
            self.reset(min(1024, self.max_context // 2), random_context=True)
            context = self._length
        best: float | None = None
        for name, tile_set in candidates:
            graph, executor = self._capture(plan_steps(self._planned, name), tile_set)
            time_ms = 0.0
            if len(candidates) > 1:
                time_ms = self._slowest_rank(median(self._time_steps(graph, context)))
                self.step_ms[name] = min(time_ms, self.step_ms.get(name, time_ms))
            if best is None or time_ms < best:
                best = time_ms
                # the executor owns the buffers that the graph writes to
                self._graph, self._executor, self.tiles = graph, executor, tile_set
        self.reset()

    def _candidate_tiles(self, gemm_backend: str) -> list[Tiles]:
        if self.batch == 1:
            if self._tiles:
                return [self._tiles]
            if self.weights.format:
                return [*GemvTiles.quantized(self.sizes, self.max_context, self.weights.format)]
            shared_memory = max_shared_memory(self.device)
            return [*GemvTiles.candidates(self.sizes, self.max_context, self._dtype.itemsize, shared_memory)]
        if gemm_backend == "cublas" or self.batch not in BATCHES or self._dtype == EXACT_DTYPE:
            return [None]
        cublas = (
            gemm_backend == "auto" and not self.weights.format
        )  # quantised weights would be dequantised for it, in each step
        return [*([None] if cublas else []), *SmallBatchTiles.candidates(self.sizes)]

    def _is_for(self, tiles: Tiles, schedule: str) -> bool:
        return self._tiles is not None or not isinstance(tiles, GemvTiles) or schedule in tiles.schedules

    def _make_ops(self, tiles: Tiles) -> Ops:
        parts = (self.spec, self.sizes, self.weights, self.cache)
        if isinstance(tiles, SmallBatchTiles):
            return SmallBatchOps(*parts, tiles, pdl=self._pdl)
        if isinstance(tiles, GemvTiles):
            return GemvOps(*parts, tiles, pdl=self._pdl, reads_before_wait=self._reads_before_wait)
        return GemmOps(*parts, pdl=self._pdl)

    def _make_executor(self, plan: Plan, ops: Ops, rows: int, *, prefill: bool = False) -> Executor:
        reducer = self._prompt_reducer if prefill else self.reducer
        if isinstance(reducer, SymmetricPromptReducer):
            reducer.next_prompt()
        # All-reduces go first when an SM frees up: neither a GEMM nor a kernel that was launched early and waits leaves them one until
        # it ends. Interleaved, attention goes before the chain: down, launched before the output projection beside it, would leave
        # that no SM, so attention's all-reduce and the next layer would be late. (If nothing delays its launch, gate/up is on the GPU
        # by then; otherwise the output projection would keep it out.)
        pdl = reducer.is_noop or (ops.pdl_all_reduce and reducer.pdl)
        attention_first = plan.can_read_before_wait and ops.reads_before_wait and pdl and self._pdl
        priorities = self._priorities or (-2 if attention_first else 0, -5)
        return Executor(
            plan, ops, reducer, CudaStreams(self.device, priorities=priorities), rows=rows, hidden=self.sizes.hidden,
            tp=self.sizes.tp, dtype=self._dtype, device=self.device,
        )  # fmt: skip

    def _capture(self, plan: Plan, tiles: Tiles) -> tuple[torch.cuda.CUDAGraph, Executor]:
        from .kernels.elementwise import advance_positions

        executor = self._make_executor(plan, self._make_ops(tiles), rows=self.batch)

        def step() -> None:
            executor.run(self._tokens, self._logits)
            advance_positions[(1,)](self.cache.positions, self.batch, BLOCK=next_power_of_2(self.batch), num_warps=1)

        side = torch.cuda.Stream(self.device)
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(side), torch.no_grad():
            step()  # compiles every kernel and sets up cuBLAS before capture
        torch.cuda.current_stream(self.device).wait_stream(side)
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        with torch.no_grad(), torch.cuda.graph(graph):
            step()
        if executor.reads_before_wait:
            chain = executor.ops.launchers[0]
            ordered = order_side_streams(
                graph, chain.launched, executor.side_functions, chain.late_waits, executor.early_all_reduces
            )  # fmt: skip
            if not self._all_ranks(ordered):
                warnings.warn(
                    "kernels were not found in the captured graph: the interleaved schedule waits first", stacklevel=2
                )
                self._reads_before_wait = False
                return self._capture(plan, tiles)
        graph.instantiate()
        self.cache.positions.zero_()
        return graph, executor

    def _time_steps(self, graph: torch.cuda.CUDAGraph, context: int) -> list[float]:
        # A replay moves on by one: never past the end of a short cache.
        return time_on_device(graph.replay, 32, before=lambda: self.cache.positions.fill_(context))[2:]

    def _slowest_rank(self, time_ms: float) -> float:
        """Ranks must choose alike: different schedules would issue their collectives in different orders and hang."""
        if self._groups is None or self.sizes.tp == 1:
            return time_ms
        slowest = torch.tensor([time_ms], device=self.device)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=self._groups[0])
        return float(slowest)

    def _all_ranks(self, condition: bool) -> bool:
        """A rank that captured a step once more on its own would wait for the others' all-reduces forever."""
        return self._slowest_rank(float(not condition)) == 0
