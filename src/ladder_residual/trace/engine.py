"""Record what the CUDA engine really did: the kernels of one replayed decode step, as torch.profiler saw them on the device.

One GPU holds one rank, so the all-reduces are emulated (``engine/reducers.py``) and the picture says so; every kernel is real.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..plan.schedule import COMM, COMPUTE, COMPUTE_2
from .panel import EMBEDDING, Span, recorded_panel, shifted, waiting_spans, write_trace

if TYPE_CHECKING:
    from ..engine.engine import DecodeEngine

# Prefixes of kernel names, which tell modules apart.
ALL_REDUCE, READS_STREAM, ATTENTION = "timed_copy", ("norm_gemv", "persistent_norm_gemv"), "decode_attention"
AROUND = ("embed", "advance_positions")  # kernels before the first and after the last module


class Kernel(NamedTuple):
    name: str
    stream: int
    start: float  # microseconds
    end: float


def read_kernels(document: dict[str, Any]) -> list[Kernel]:
    """The device's kernels in a trace of torch.profiler, in the order they began."""
    events = [event for event in document["traceEvents"] if event.get("cat") == "kernel"]
    kernels = [Kernel(e["name"], int(e["args"]["stream"]), float(e["ts"]), float(e["ts"]) + float(e["dur"])) for e in events]
    return sorted(kernels, key=lambda kernel: kernel.start)


def engine_spans(kernels: Iterable[Kernel], num_chains: int = 1, all_reduce_layers: Sequence[int] = ()) -> list[Span]:
    """Modules and all-reduces of one step at batch 1. A module begins with the kernel that reads the residual stream; attention has an
    attention kernel; what is left after the last layer is the head. A replayed graph runs one chain on any CUDA streams, so only two
    chains are told apart by them. ``all_reduce_layers``: the layer of each all-reduce in turn; by default two a layer."""
    kernels = sorted(kernels, key=lambda kernel: kernel.start)
    if num_chains == 1:
        kernels = [kernel._replace(stream=0) for kernel in kernels]
    modules = sorted(
        (m for stream in _by_stream(kernels).values() for m in _modules(stream)), key=lambda module: module[0].start
    )
    seen = {"attention": 0, "MLP": 0}
    spans = []
    for index, module in enumerate(modules):
        name = "attention" if any(k.name.startswith(ATTENTION) for k in module) else "MLP"
        if index == len(modules) - 1:
            name, layer = "head", seen["MLP"] - 1
        else:
            layer = seen[name]
            seen[name] += 1
        row = COMPUTE if num_chains == 1 or name == "attention" else COMPUTE_2
        spans.append(Span(row, name, layer, module[0].start, module[-1].end))
    all_reduces = [kernel for kernel in kernels if kernel.name.startswith(ALL_REDUCE)]
    for number, kernel in enumerate(all_reduces):
        name = EMBEDDING if number == 0 else "all-reduce"
        known = 0 < number <= len(all_reduce_layers)
        layer = all_reduce_layers[number - 1] if known else max(number - 1, 0) // 2
        spans.append(Span(COMM, name, layer, kernel.start, kernel.end))
    return spans + waiting_spans(spans)


def _by_stream(kernels: Sequence[Kernel]) -> dict[int, list[Kernel]]:
    found: dict[int, list[Kernel]] = {}
    for kernel in kernels:
        if not kernel.name.startswith((ALL_REDUCE, *AROUND)):
            found.setdefault(kernel.stream, []).append(kernel)
    return found


def _modules(kernels: Sequence[Kernel]) -> list[list[Kernel]]:
    modules: list[list[Kernel]] = []
    for kernel in kernels:
        if kernel.name.startswith(READS_STREAM) or not modules:
            modules.append([])
        modules[-1].append(kernel)
    return modules


def profile_step(engine: DecodeEngine, context: int) -> list[Kernel]:
    """The kernels of one replayed step."""
    import torch

    engine.reset(context, random_context=True)
    for _ in range(3):
        engine.replay()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        engine.replay()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "trace.json"
        profiler.export_chrome_trace(str(file))
        return read_kernels(json.loads(file.read_text()))


def record_engine(
    *, model: str, layers: int, tp: int, link: str, wirings: Sequence[str], context: int, schedule: str, folder: Path
) -> dict[str, Any]:
    """Record one step of every wiring at batch 1; writes ``trace.json`` and ``timeline.svg``."""
    import torch

    from ..common.environment import environment
    from ..engine.cuda.pdl import PdlMode
    from ..engine.random_rank import RandomRank
    from ..links import parse_link
    from ..plan.models import resolve_model

    if schedule not in ("auto", "serial", "two_stream"):
        raise ValueError(f"a trace shows modules, got --schedule {schedule}: choose auto, serial or two_stream")
    if not torch.cuda.is_available():
        raise ValueError("recording the engine needs a CUDA device; `ladder trace --tp 2` records CPU ranks")
    if tp < 2:
        raise ValueError(f"there is nothing to wait for with one rank, got --tp {tp}: emulate a rank of several")
    rank = RandomRank(*resolve_model(model), tp, layers=layers)
    panels, rows = [], []
    for wiring in wirings:
        # A kernel that is launched early waits inside its own span, so PDL is off here.
        asked: dict[str, Any] = dict(batch=1, max_context=context + 16, pdl=PdlMode.OFF)
        engine = rank.engine(wiring, parse_link(link, tp=tp), **asked, schedule=schedule)
        if engine.schedule == "interleaved":  # attention's kernels lie among the MLP's there: no modules to draw
            times = engine.step_ms
            del engine
            faster = "two_stream" if times.get("two_stream", math.inf) < times["serial"] else "serial"
            engine = rank.engine(wiring, parse_link(link, tp=tp), **asked, schedule=faster)
        kernels = profile_step(engine, context)
        spans = shifted(engine_spans(kernels, engine.num_chains, engine.all_reduce_layers), kernels[0].start)
        panels.append(recorded_panel(f"{wiring}, {engine.schedule}", spans, "emulated"))
        step = {"schedule": engine.schedule, "step_us": max(span.end for span in spans)}
        rows.append({**panels[-1].facts(), "wiring": wiring, **step})
        del engine
        torch.cuda.empty_cache()
    setting = (
        f"{model}, {layers} layers, one rank of tp {tp}, batch 1, context {context}; "
        f"kernels recorded without PDL, all-reduces emulated: {link}"
    )
    about = {"kind": "trace", "setting": setting, "label": "emulated", "tp": tp, "link": link, "wirings": rows, **environment()}
    trace, picture = write_trace(panels, about, folder)
    return {**about, "trace": str(trace), "timeline": str(picture)}
