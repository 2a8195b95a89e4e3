"""Which all-reduces run beside the modules on CUDA, and which in line with them: chosen by message size, once, as the model is built.

Beside a module an all-reduce costs two dependencies between streams, and multiprocessors that the module would use. Where all-reduces are
faster than that, they are better done in line, as vLLM does. The wiring computes the same either way.

Decode steps run in one CUDA graph. Prompts of as few tokens run in graphs that end at each attention, where no all-reduce can be in
flight: half of them are hidden there, and all of them only if prompts leave the graphs. That too must pay.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..core.reduce import Reducer, ReduceWork

VARIABLE = "VLLM_LADDER_OVERLAP"
MODES = ("auto", "always", "never")

GAIN = 0.97  # in a graph overlapped must take less than this share of the time in line
# The same for prompts outside graphs, whose modules launch more than those timed here.
PROMPT_GAIN = 0.9
PROMPT = 16  # tokens of the smallest prompt that counts
MODULES = 8  # in one timing
REPLAYS = 4


def asked() -> str:
    mode = os.environ.get(VARIABLE, "auto")
    if mode not in MODES:
        raise ValueError(f"{VARIABLE} is {mode!r:.40}; choose from {', '.join(MODES)}")
    return mode


class Times(NamedTuple):
    """Milliseconds of some modules; ``graph``: captured, else launched one by one."""

    in_line: float
    beside: float
    graph: bool = True
    beside_without_graph: float | None = None


class Overlap(NamedTuple):
    """``pays`` for numbers of tokens in rising order; a batch counts as the nearest one that is no larger. ``without_graphs``: prompts
    leave their CUDA graphs."""

    pays: tuple[tuple[int, bool], ...]
    without_graphs: bool = False

    def of(self, tokens: int) -> bool:
        chosen = self.pays[0][1]
        for count, pays in self.pays:
            if count > tokens:
                break
            chosen = pays
        return chosen

    @property
    def anywhere(self) -> bool:
        return any(pays for _, pays in self.pays)

    def __str__(self) -> str:
        if not self.anywhere:
            return "in line with the modules"
        text = "beside the modules"
        if not all(pays for _, pays in self.pays):
            text += f" for batches of about {', '.join(str(count) for count, pays in self.pays if pays)} tokens, else in line"
        return f"{text}; prompts leave their CUDA graphs" if self.without_graphs else text


ALWAYS, NEVER = Overlap(((1, True),), without_graphs=True), Overlap(((1, False),))


def decide(times: Sequence[Mapping[int, Times]], fused: bool = False) -> Overlap:
    """From every rank's times by number of tokens. All ranks of all stages must come to the same. ``fused``: as in ``measure``; a layer
    with all-reduces beside it for some batches has no such kernel for the others, so it is all batches or none."""
    pays, kept, left = [], 0.0, 0.0  # of prompts in line in graphs, and of the same beside without
    for tokens in sorted(times[0]):
        ranks = [rank[tokens] for rank in times]
        in_line, beside = sum(each.in_line for each in ranks), sum(each.beside for each in ranks)
        pays.append((tokens, beside < (GAIN if ranks[0].graph else PROMPT_GAIN) * in_line))
        if pays[-1][1] and tokens >= PROMPT and ranks[0].beside_without_graph is not None:
            kept += in_line
            left += sum(each.beside_without_graph or 0.0 for each in ranks)
    if fused and not all(each for _, each in pays):
        return NEVER
    return Overlap(tuple(pays), without_graphs=left < PROMPT_GAIN * kept)


def module_bytes(config: Any, ranks: int, weight_bytes: float) -> int:
    """Weights that one rank's module reads, the mean of attention and MLP."""
    hidden, heads = config.hidden_size, config.num_attention_heads
    head = getattr(config, "head_dim", None) or hidden // heads
    attention = 2 * hidden * head * (heads + (getattr(config, "num_key_value_heads", None) or heads))
    return int((attention + 3 * hidden * config.intermediate_size) * weight_bytes / 2 / ranks)


def measure(
    group: Any,
    stages: Any,
    in_line: Reducer,
    beside: Reducer,
    hidden: int,
    weights: int,
    dtype: torch.dtype,
    most_tokens: int,
    captured: int,
    graphs: list[torch.cuda.CUDAGraph],
    fused: bool,
) -> Overlap:
    """Times both ways around a module that reads ``weights`` bytes, up to ``captured`` tokens in a CUDA graph, as vLLM runs them. The
    caller keeps ``graphs``: other ranks have mapped their memory, and a mapping outlives what is freed. ``fused``: vLLM has a kernel that
    all-reduces and norms, so in line the norm is counted as free."""
    inner = max(64, weights // (2 * hidden * dtype.itemsize) // 64 * 64)
    up, down = (torch.zeros(shape, dtype=dtype, device="cuda") for shape in ((hidden, inner), (inner, hidden)))
    norm = torch.ones(hidden, dtype=dtype, device="cuda")
    times = {}
    for tokens in token_counts(most_tokens):
        x = torch.zeros(tokens, hidden, dtype=dtype, device="cuda")
        kept = graphs if tokens <= captured else None
        alone, overlapped = (
            partial(modules, x, up, down, norm, in_line, fused=fused), partial(modules, x, up, down, norm, beside)
        )  # fmt: skip
        ways = [_timed(alone, group, kept), _timed(overlapped, group, kept)]
        if kept is not None:
            ways.append(_timed(overlapped, group, None))
        best = [float("inf")] * len(ways)
        for number in range(REPLAYS):  # in turn
            for way in range(len(ways))[:: 1 if number % 2 else -1]:
                best[way] = min(best[way], ways[way]())
        times[tokens] = Times(best[0], best[1], kept is not None, best[2] if kept is not None else None)
        del ways
    torch.cuda.empty_cache()  # vLLM measures next what is free
    everybody: list[Any] = [times]
    for ranks in (group, stages):
        parts: list[Any] = [None] * ranks.world_size
        dist.all_gather_object(parts, everybody, group=ranks.cpu_group)
        everybody = [each for part in parts for each in part]
    return decide(everybody, fused)


def token_counts(most: int) -> list[int]:
    """1, 4, 16 and so on."""
    counts = [1]
    while 4 * counts[-1] <= most:
        counts.append(4 * counts[-1])
    return counts


def modules(x: Tensor, up: Tensor, down: Tensor, norm: Tensor, reducer: Reducer, *, fused: bool = False) -> Tensor:
    """A few modules of a ladder, as ``ops.py`` joins them; ``fused``: without the add and the norm between them."""
    from ..engine.kernels.join import ADD, norm_after_joining

    stream, module_input = x, x
    flying: tuple[ReduceWork, Tensor] | None = None
    for _ in range(MODULES):
        output = module_input @ up @ down
        started = (reducer.launch(output), output)
        if fused:
            module_input = flying[0].wait() if flying else x
        else:
            terms = [(flying[0].wait(), ADD.value, None)] if flying else []
            module_input, stream = norm_after_joining(stream, terms, norm, 1e-6, 0.0)
        flying = started
    assert flying is not None
    return flying[0].wait()


def _timed(run: Callable[[], Any], group: Any, graphs: list[torch.cuda.CUDAGraph] | None) -> Callable[[], float]:
    """A function that says how many milliseconds ``run`` takes; in a graph, if there is a list for it."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(2):
        run()
    torch.cuda.synchronize()
    if graphs is not None:
        graph = torch.cuda.CUDAGraph()
        # As this ends, vLLM's IPC all-reduce tells the ranks where the graph's buffers are. A replay before that reads anywhere.
        with group.graph_capture() as context, torch.cuda.graph(graph, stream=context.stream):
            run()
        graphs.append(graph)
        run = graph.replay

    def time() -> float:
        run()
        begin.record()
        run()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end)

    return time
