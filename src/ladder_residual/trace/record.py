"""Record what really ran: decode steps of each wiring under torch.profiler, on every rank.

Every module, every start of an all-reduce and every wait for one is a named range of the profiler. On a CPU host the ranges themselves
are the timeline. On CUDA the host only queues work, so the timeline is what the device did: the kernels queued inside a range,
and NCCL's own kernels.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function
from transformers import PreTrainedModel

from ..common.environment import environment
from ..core.reduce import Pending, RecordingReducer, Reducer
from ..distributed.world import World
from ..generation.decode_loop import DecodeLoop, synchronize
from ..models.hf import decoder_layers
from ..models.random_weights import load_or_random_model
from ..plan.schedule import COMM, COMPUTE
from .panel import EMBEDDING, LOGITS, WAITING, Span, hidden_percent, recorded_panel, shifted, waiting_spans, write_trace
from .request import check_request

MARK = "ladder-residual"
WARM_UP = 3  # the prompt, then two steps


class Marks(RecordingReducer):
    """A reducer that gives the profiler a range for every start and wait, and for every module it watches."""

    def __init__(self, inner: Reducer) -> None:
        super().__init__(inner)
        self._module: record_function | None = None
        self._last = ("embedding", 0)

    def begin(self, name: str, layer: int) -> None:
        if self._module is None:  # a norm has opened it already
            self._module, self._last = _range("compute", name, layer), (name, layer)
            self._module.__enter__()

    def end(self) -> None:
        if self._module is not None:
            self._module.__exit__(None, None, None)
            self._module = None

    def start(self, partial: Tensor) -> Pending:
        name, layer = self._last
        number = len(self.reductions)
        with _range("start", EMBEDDING if name == "embedding" else f"all-reduce of {name}", layer, number):
            return super().start(partial)

    def wait(self, pending: Pending) -> Tensor:
        with _range("wait", "wait", 0, self.reductions.index(pending.reduction)):
            return super().wait(pending)

    def gather(self, local: Tensor) -> Tensor:
        self.end()
        with _range("gather", LOGITS, self._last[1]):
            return super().gather(local)

    def step(self, number: int) -> record_function:
        self._last = ("embedding", 0)
        return _range("step", "step", 0, number)

    def watch_model(self, model: PreTrainedModel) -> list[Any]:
        """Hooks from a module's pre-norm to its end, and on the head; returns them for removal."""
        handles = []
        layer: Any
        for index, layer in enumerate(decoder_layers(model)):
            family = layer.placement.family
            for name, module, norm in (
                ("attention", family.attention, family.attention_norm),
                ("MLP", family.mlp, family.mlp_norm),
            ):
                opening = [getattr(layer, part) for part in (norm, module) if part and hasattr(layer, part)]
                handles += self._hooks(name, index, opening, getattr(layer, module))
        head = model.get_output_embeddings()
        return handles + self._hooks("head", len(decoder_layers(model)) - 1, [head], head)

    def _hooks(self, name: str, layer: int, opening: Sequence[nn.Module], closing: nn.Module) -> list[Any]:
        handles: list[Any] = [part.register_forward_pre_hook(lambda *_: self.begin(name, layer)) for part in opening]
        return [*handles, closing.register_forward_hook(lambda *_: self.end())]


def _range(kind: str, name: str, layer: int, number: int = 0) -> record_function:
    return record_function(f"{MARK}|{kind}|{name}|{layer}|{number}")


class Range(NamedTuple):
    """A range of the profiler, microseconds on the host's clock."""

    kind: str  # step, compute, start, wait, gather; nccl for a kernel of NCCL
    name: str
    layer: int
    number: int
    start: float
    end: float


@dataclass(frozen=True)
class LinkTimes:
    """Seconds of one all-reduce on its own: over the link as it is, and what the emulation adds."""

    bare: float
    latency: float


def read_ranges(document: Mapping[str, Any], *, on_device: bool) -> list[Range]:
    """Our ranges in a trace of torch.profiler; with ``on_device`` those of the kernels, and NCCL's kernels themselves."""
    base = float(document.get("baseTimeNanoseconds", 0)) / 1e3
    category = "gpu_user_annotation" if on_device else "user_annotation"
    found = []
    for event in document["traceEvents"]:
        if event.get("ph") != "X":
            continue
        start = base + float(event["ts"])
        end = start + float(event["dur"])
        mark, *words = event["name"].split("|")
        if event.get("cat") == category and mark == MARK:
            kind, name, layer, number = words
            found.append(Range(kind, name, int(layer), int(number), start, end))
        elif on_device and event.get("cat") == "kernel" and "nccl" in event["name"].lower():
            found.append(Range("nccl", event["name"], 0, 0, start, end))
    return sorted(found, key=lambda one: one.start)


def host_spans(ranges: Iterable[Range], link: LinkTimes) -> list[Span]:
    """The timeline of one step of a rank that computes on its host.

    A wait is exposed for as long as it lasts. An all-reduce is in flight from its start until its result is there; if nobody stood
    waiting at that moment it is taken to last as long as an all-reduce on its own.
    """
    spans = []
    waits = {one.number: one for one in ranges if one.kind == "wait"}
    for one in ranges:
        if one.kind == "compute":
            spans.append(Span(COMPUTE, one.name, one.layer, one.start, one.end))
        elif one.kind == "gather":
            spans.append(Span(COMM, one.name, one.layer, one.start, one.end))
            spans.append(Span(COMPUTE, WAITING, one.layer, one.start, one.end))
        elif one.kind == "start" and one.number in waits:
            wait = waits[one.number]
            alone = one.start + 1e6 * (link.bare + link.latency)
            # A wait that takes longer than a whole all-reduce over the bare link was not only picking up what had come.
            blocked = alone > wait.start or wait.end - wait.start > 1e6 * link.bare
            spans.append(Span(COMM, one.name, one.layer, one.end, wait.end if blocked else max(one.end, alone)))
            spans.append(Span(COMPUTE, WAITING, one.layer, wait.start, wait.end))
    return spans


def device_spans(ranges: Iterable[Range], starts: Sequence[Range]) -> list[Span]:
    """The timeline of one step of a rank that computes on a GPU; ``starts`` are the host's, in the order NCCL runs them."""
    spans = [Span(COMPUTE, one.name, one.layer, one.start, one.end) for one in ranges if one.kind == "compute"]
    for one, kernel in zip(starts, (one for one in ranges if one.kind == "nccl"), strict=False):
        spans.append(Span(COMM, one.name, one.layer, kernel.start, kernel.end))
    return spans + waiting_spans(spans)


def _steps(document: Mapping[str, Any], link: LinkTimes, device: torch.device) -> list[list[Span]]:
    """The spans of every recorded step."""
    host = read_ranges(document, on_device=False)
    found = []
    for step in (one for one in host if one.kind == "step"):
        inside = [one for one in host if one.kind != "step" and step.start <= one.start <= step.end]
        if device.type == "cuda":
            # The step ends on the host after a synchronisation, so all its kernels lie inside it.
            kernels = [one for one in read_ranges(document, on_device=True) if step.start <= one.start <= step.end]
            found.append(device_spans(kernels, [one for one in inside if one.kind in ("start", "gather")]))
        else:
            found.append(host_spans(inside, link))
    return found


@torch.inference_mode()
def record_wiring(
    model: PreTrainedModel, spec: str, world: World, link: LinkTimes, batch: int, prompt: int, steps: int, keep: Path | None
) -> list[list[Span]]:
    marks = Marks(world.reducer("async", latency=link.latency))
    decoder = DecodeLoop(model, spec, marks, batch, prompt, world.device)
    for _ in range(WARM_UP):
        decoder.step()
    handles = marks.watch_model(model)
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if world.device.type == "cuda" else [])
    try:
        with profile(activities=activities) as profiler:
            for number in range(steps + 1):  # the first one pays for the start of the profiler
                decoder.rewind()
                world.barrier()
                with marks.step(number):
                    decoder.step()
                    synchronize(world.device)
    finally:
        for handle in handles:
            handle.remove()
    with tempfile.TemporaryDirectory() as folder:
        file = keep or Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        return _steps(json.loads(file.read_text()), link, world.device)[1:]


@torch.inference_mode()
def _bare_all_reduce(world: World, message: Tensor, repeats: int = 20) -> float:
    """Seconds of one all-reduce over the link as it is, nothing beside it."""
    reducer, times = world.reducer(), []
    for _ in range(repeats):
        world.barrier()
        begin = time.perf_counter()
        reducer.start(message).wait()
        synchronize(world.device)
        times.append(time.perf_counter() - begin)
    return world.broadcast(statistics.median(times))


def record(
    world: World,
    *,
    source: str,
    layers: int | None,
    wirings: Sequence[str],
    latency: float,
    batch: int,
    prompt: int,
    steps: int,
    dtype: str,
    folder: Path,
    profiles: bool = False,
) -> dict[str, Any]:
    """Record every wiring; rank 0 writes ``trace.json`` (all ranks) and ``timeline.svg`` (rank 0). Returns the facts."""
    check_request(source=source, layers=layers, wirings=wirings, batch=batch, prompt=prompt, steps=steps, tp=world.size)
    model = load_or_random_model(source, world, layers=layers, dtype=dtype)
    message = torch.zeros(batch, 1, model.config.hidden_size, dtype=model.dtype, device=world.device)
    link = LinkTimes(_bare_all_reduce(world, message), latency)
    if profiles:
        folder.mkdir(parents=True, exist_ok=True)
    panels, drawn, rows = [], [], []
    for spec in wirings:
        keep = folder / f"profile-{spec.replace(':', '-')}-rank{world.rank}.json" if profiles else None
        ranks: list[Any] = [None] * world.size
        mine = record_wiring(model, spec, world, link, batch, prompt, steps, keep)
        torch.distributed.all_gather_object(ranks, mine, group=world.group)
        made = [recorded_panel(f"{spec}, rank {k}", spans, "measured") for k, spans in enumerate(median_step(ranks))]
        panels += made
        drawn.append(replace(made[0], title=spec))
        all_hidden = [hidden_percent(spans) for rank in ranks for spans in rank]
        rows.append(
            {
                "wiring": spec,
                "layer_us": made[0].layer_us,
                "step_ms": max(span.end for panel in made for span in panel.spans) / 1e3,
                "hidden_percent": [panel.hidden_percent for panel in made],
                "median_hidden_percent": statistics.median(all_hidden),
            }
        )
    over = f"this host's link + {1e3 * latency:g} ms emulated latency" if latency else "this host's link as it is"
    where = f"{Path(source).name}, {model.config.num_hidden_layers} layers, {world.device.type}, tp {world.size}, batch {batch}"
    about: dict[str, Any] = {
        "kind": "trace",
        "setting": f"{where}, {over}; rank 0, one recorded decode step",
        "label": "measured",
        "weights": "checkpoint" if Path(source).is_dir() else "random",
        "tp": world.size,
        "batch": batch,
        "latency_us": 1e6 * latency,
        "bare_all_reduce_us": 1e6 * link.bare,
        "recorded_steps": steps,
        "wirings": rows,
        **environment(),
    }
    if not world.is_main:
        return about
    trace, picture = write_trace(panels, about, folder, drawn)
    return {**about, "trace": str(trace), "timeline": str(picture)}


def median_step(ranks: Sequence[Sequence[Sequence[Span]]]) -> list[list[Span]]:
    """Of all ranks the step of median length, counted from the first moment any of them was at work."""
    steps = list(zip(*ranks, strict=True))
    length = [max(s.end for one in step for s in one) - min(s.start for one in step for s in one) for step in steps]
    chosen = steps[sorted(range(len(steps)), key=lambda k: length[k])[len(steps) // 2]]
    zero = min(span.start for spans in chosen for span in spans)
    return [shifted(spans, zero) for spans in chosen]
