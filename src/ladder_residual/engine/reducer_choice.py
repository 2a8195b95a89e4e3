"""Which reducer a rank gets: the one asked for, or the faster one, timed with all ranks."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..links import Link
from . import REAL_REDUCERS
from .cuda.launcher import Launcher
from .cuda.pdl import PdlMode
from .cuda.timing import time_on_device
from .reducers import (
    ONE_SHOT_BYTES,
    EmulatedReducer,
    EngineReducer,
    NcclReducer,
    NoReducer,
    SymmetricPromptReducer,
    SymmetricReducer,
)

SYMMETRIC_DTYPES = (torch.bfloat16, torch.float32)
PROMPT_ROWS = 512  # tokens; the message by which `auto` chooses for prompts
IN_A_ROW = 20  # all-reduces of a timed graph


class NoSymmetricMemory(RuntimeError):
    """At least one of the ranks has none; all of them know."""


class Choice(NamedTuple):
    decode: EngineReducer
    prompts: EngineReducer
    all_reduce_us: dict[str, float]  # timed in a CUDA graph, a decode step's message


def choose_reducers(
    kind: str, *, tp: int, link: Link | None, groups: tuple[Any, Any] | None, batch: int, hidden: int, dtype: torch.dtype,
    device: torch.device,
) -> Choice:  # fmt: skip
    """``auto``: symmetric memory or NCCL, whichever is faster for a decode step's message, and for a prompt's."""
    if kind != "auto":
        made = make_reducer(kind, tp=tp, link=link, groups=groups, dtype=dtype, device=device)
        return Choice(made, for_prompts(made), {})
    if tp == 1:
        return Choice(NoReducer(), NoReducer(), {})
    assert groups is not None, "reducer 'auto' needs groups: two process groups of all ranks"
    candidates: dict[str, EngineReducer] = {}
    problem = ""
    try:
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            candidates["symm"] = _symmetric_reducer(groups[0], dtype, device)
    except NoSymmetricMemory as error:
        problem = str(error)
    if has_nccl(groups[0]):
        candidates["nccl"] = NcclReducer(groups)
    if not candidates:
        raise ValueError(f"these ranks have neither NCCL nor symmetric memory ({problem:.120}): use --engine torch")
    if len(candidates) == 1:
        (only,) = candidates.values()
        return Choice(only, for_prompts(only), {})
    times = {name: time_all_reduce(made, groups[0], batch, hidden, dtype, device) for name, made in candidates.items()}
    prompts = {name: for_prompts(made) for name, made in candidates.items()}
    long = {name: time_all_reduce(made, groups[0], PROMPT_ROWS, hidden, dtype, device) for name, made in prompts.items()}
    return Choice(candidates[min(times, key=times.__getitem__)], prompts[min(long, key=long.__getitem__)], times)


def for_prompts(reducer: EngineReducer) -> EngineReducer:
    return SymmetricPromptReducer(reducer.group) if isinstance(reducer, SymmetricReducer) else reducer


def has_nccl(group: Any) -> bool:
    return "nccl" in str(dist.get_backend_config(group))


def time_all_reduce(
    reducer: EngineReducer, group: Any, rows: int, hidden: int, dtype: torch.dtype, device: torch.device, repeats: int = 7
) -> float:  # fmt: skip
    """Microseconds of one all-reduce among several in a row in a CUDA graph, on the slowest rank; to be called by all ranks."""
    launch = Launcher(PdlMode.OFF)
    partial, reduced = reducer.allocate(rows, hidden, dtype, device, keep_partial=True)
    partial.zero_()
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        reducer.reduce(partial, reduced, 0, launch)  # sets up what capture must not
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(IN_A_ROW):
            reducer.reduce(partial, reduced, 0, launch)
    microseconds = 1e3 * median(time_on_device(graph.replay, repeats)[1:]) / IN_A_ROW
    slowest = torch.tensor([microseconds], device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=group)
    return float(slowest)


def _symmetric_reducer(group: Any, dtype: torch.dtype, device: torch.device) -> SymmetricReducer:
    """NoSymmetricMemory on every rank if one of them has none: the others must not wait for it in the next stage."""
    reducer: Any = None
    buffers: list[Tensor] = []

    def allocate() -> None:
        nonlocal reducer
        if dtype not in SYMMETRIC_DTYPES:
            raise RuntimeError(f"it reduces bfloat16 and float32, not {dtype}")
        reducer = SymmetricReducer(group)
        one_shot, two_shot = 1, 1 + ONE_SHOT_BYTES // (1024 * dtype.itemsize)
        buffers.extend(reducer.empty(rows, 1024, dtype, device) for rows in (one_shot, two_shot))

    def rendezvous() -> None:
        for buffer in buffers:
            reducer.rendezvous(buffer)

    def reduce() -> None:
        small, large = (buffer.zero_() for buffer in buffers)
        reducer.reduce(small, torch.empty_like(small), 0, Launcher(PdlMode.OFF))
        reducer.reduce(large, large, 0, Launcher(PdlMode.OFF))
        torch.cuda.synchronize(device)

    for stage in (allocate, rendezvous, reduce):
        problem = ""
        try:
            stage()
        except (RuntimeError, ImportError, AttributeError) as error:
            problem = str(error).splitlines()[0] if str(error) else type(error).__name__
        works = torch.tensor([0 if problem else 1], device=device)
        dist.all_reduce(works, op=dist.ReduceOp.MIN, group=group)
        if not int(works):
            raise NoSymmetricMemory(problem or "another rank has none")
    return reducer


def make_reducer(
    kind: str, *, tp: int, link: Link | None, groups: tuple[Any, Any] | None, dtype: torch.dtype, device: torch.device
) -> EngineReducer:
    """``symm`` falls back to ``nccl`` with one warning where the hardware or the dtype lacks it."""
    if kind == "none":
        if tp > 1:
            raise ValueError(f"reducer 'none' on tp={tp} would drop the other ranks: use 'nccl', 'symm' or 'emulated'")
        return NoReducer()
    if kind == "emulated":
        if link is None:
            raise ValueError("reducer 'emulated' needs a link, such as parse_link('24us')")
        return NoReducer() if link.silent else EmulatedReducer(link, tp, device)
    if kind not in REAL_REDUCERS:
        raise ValueError(f"unknown reducer {kind!r}; choose from none, emulated, {', '.join(REAL_REDUCERS)}")
    if groups is None:
        raise ValueError(f"reducer {kind!r} needs groups: two process groups of all ranks")
    if kind == "symm":
        try:
            with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
                return _symmetric_reducer(groups[0], dtype, device)
        except NoSymmetricMemory as error:
            if device.type == "cuda" and not has_nccl(groups[0]):
                raise ValueError(f"no symmetric memory here ({error!s:.120}), and these ranks have no NCCL") from error
            warnings.warn(f"no symmetric memory here ({error!s:.120}); using NCCL", stacklevel=2)
    return NcclReducer(groups)
