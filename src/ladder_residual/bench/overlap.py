"""How much of the communication each wiring hides: decode steps of one model over a link of chosen latency, on real ranks.

Wirings are measured in one run, interleaved, so that a busy machine slows all of them alike. Two bounds frame the result: the
step without any communication (compute), and the all-reduces of a step done back to back (communication). Standard takes about
their sum; nothing that sends the same messages can be faster than the larger one.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import torch
from transformers.cache_utils import DynamicCache

from ..common.environment import environment
from ..core.reduce import Reducer
from ..distributed.world import World
from ..generation.decode_loop import DecodeLoop, synchronize
from ..models.candidates import GREEDY
from ..models.random_weights import load_or_random_model
from .checks import PHASES, check_repeats
from .timing import quartiles

COMPUTE = "no-comm"  # the wiring whose time is the compute bound


class _Prefill(DecodeLoop):
    """Every step reads the whole prompt anew."""

    def forward(self) -> None:
        self.model(self.token, use_cache=False, logits_to_keep=1)


class _EndToEnd(DecodeLoop):
    """Every step reads the prompt anew and writes ``new`` tokens after it."""

    new = 1

    def forward(self) -> None:
        cache, token = DynamicCache(config=self.model.config), self.token
        for _ in range(self.new):
            logits = self.model(token, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
            token = logits[:, -1:].argmax(-1)


LOOPS: dict[str, type[DecodeLoop]] = dict(zip(PHASES, (DecodeLoop, _Prefill, _EndToEnd), strict=True))


def _communication(reducer: Reducer, message: torch.Tensor, count: int, repeats: int, world: World) -> list[float]:
    times = []
    for _ in range(repeats):
        world.barrier()
        start = time.perf_counter()
        for _ in range(count):
            reducer.start(message).wait()
        synchronize(world.device)
        times.append(time.perf_counter() - start)
    return times


def _shorter_module(decoder: DecodeLoop, model: Any) -> float:
    """Seconds the shorter of a layer's two modules computes: the largest latency that a ladder can hide entirely."""
    layer = model.base_model.layers[len(model.base_model.layers) // 2]
    family = layer.placement.family
    medians = []
    for name in (family.attention, family.mlp):
        module: torch.nn.Module = getattr(layer, name)
        starts: list[float] = []
        ends: list[float] = []
        before = module.register_forward_pre_hook(lambda *_, times=starts: times.append(time.perf_counter()))
        after = module.register_forward_hook(lambda *_, times=ends: times.append(time.perf_counter()))
        for _ in range(10):
            decoder.rewind()
            decoder.step()
        before.remove()
        after.remove()
        medians.append(statistics.median(end - start for start, end in zip(starts, ends, strict=True)))
    return min(medians)


@torch.inference_mode()
def measure_overlap(
    world: World,
    *,
    model: Any,
    wirings: list[str],
    latency: float | None = None,
    batch: int = 1,
    prompt: int = 16,
    new: int = 1,
    repeats: int = 30,
    phase: str = "decode",
    reducer: Reducer | None = None,
) -> dict[str, Any]:
    """Steps of every wiring, interleaved. ``latency`` is the emulated time of an all-reduce in seconds; None picks the time of
    one module (the shorter one of a layer). ``reducer`` replaces the default one where no latency is emulated. A step of phase
    ``e2e`` is a prompt and ``new`` tokens."""
    if world.size < 2:
        raise ValueError("hiding all-reduces needs at least two ranks: run with --tp 2")
    if phase not in PHASES:
        raise ValueError(f"unknown phase {phase!r}; choose {', '.join(PHASES)}")
    if new < 1:
        raise ValueError(f"new must be at least 1, got {new}")
    check_repeats(repeats)
    config = model.config
    modules = 2 * config.num_hidden_layers
    names = list(dict.fromkeys(["standard", *wirings, COMPUTE]))
    plain = reducer or world.reducer()

    def decoders(reducer: Reducer, specs: list[str]) -> dict[str, DecodeLoop]:
        made = {spec: LOOPS[phase](model, spec, reducer, batch, prompt, world.device) for spec in specs}
        for decoder in made.values():
            if isinstance(decoder, _EndToEnd):
                decoder.new = new
            for _ in range(3):  # the prompt, then two steps to warm up
                decoder.step()
        return made

    def rounds(made: dict[str, DecodeLoop], count: int) -> dict[str, list[float]]:
        times: dict[str, list[float]] = {spec: [] for spec in made}
        for _ in range(count):
            for spec, decoder in made.items():
                decoder.rewind()
                decoder.rewire()
                world.barrier()
                start = time.perf_counter()
                decoder.forward()
                synchronize(world.device)
                times[spec].append(time.perf_counter() - start)
        return {spec: world.slowest(seconds) for spec, seconds in times.items()}

    if latency is None:
        latency = world.broadcast(_shorter_module(decoders(plain, [COMPUTE])[COMPUTE], model))
    reducer = world.reducer("async", latency=latency) if latency else plain
    model.needs(GREEDY)  # tokens are chosen as generate chooses them
    try:
        times = rounds(decoders(reducer, names), repeats)
    finally:
        model.needs(None)
    # tokens of a sequence in each forward of a step
    passes = {"decode": [1], "prefill": [prompt], "e2e": [prompt] + [1] * (new - 1)}[phase]
    tokens = new if phase == "e2e" else passes[0]  # that count: what a step reads or, end to end, writes
    communication = 0.0
    for length in sorted(set(passes)):
        message = torch.zeros(batch, length, config.hidden_size, dtype=model.dtype, device=world.device)
        once = statistics.median(world.slowest(_communication(reducer, message, modules, 10, world)))
        communication += passes.count(length) * once
    compute = statistics.median(times[COMPUTE])
    standard = statistics.median(times["standard"])
    bound = max(compute, communication)
    rows = []
    for spec in names:
        step = statistics.median(times[spec])
        exposed = standard - compute
        rows.append(
            {
                "wiring": spec,
                **quartiles(times[spec]),
                "tokens_per_s": batch * tokens / step,
                "speedup": standard / step,
                "over_bound": step / bound,
                "hidden_percent": 100 * (standard - step) / exposed if exposed > 0 else None,
            }
        )
    return {
        "benchmark": "overlap",
        "phase": phase,
        "link": f"this host's link + {1e6 * latency:.0f} us emulated latency per all-reduce"
        if latency
        else "this host's link as it is",
        "latency_us": 1e6 * latency,
        "tp": world.size,
        "batch": batch,
        "prompt": prompt,
        "layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "all_reduces_per_step": modules * len(passes),
        "message_bytes": message.numel() * message.element_size(),
        "compute_ms": 1e3 * compute,
        "communication_ms": 1e3 * communication,
        "bound_ms": 1e3 * bound,
        "repeats": repeats,
        "rows": rows,
        **environment(),
    }


def run(world: World, *, source: str, layers: int | None = None, dtype: str = "float32", **options: Any) -> dict[str, Any]:
    """The command: ``source`` is a checkpoint directory or the name of a published shape (random weights)."""
    model = load_or_random_model(source, world, layers=layers, dtype=dtype)
    result = measure_overlap(world, model=model, **options)
    return {"model": source, "weights": "checkpoint" if Path(source).is_dir() else "random", **result}


def run_cases(
    world: World, *, source: str, phase: str, batches: list[int], latencies: list[float | None], **options: Any
) -> dict[str, Any]:
    """``run`` for every batch and latency, as one result: a row per case and wiring."""
    parts = [
        run(world, source=source, latency=latency, batch=batch, phase=phase, **options)
        for batch in batches
        for latency in latencies
    ]
    of_case = ("batch", "link", "compute_ms", "communication_ms", "bound_ms")
    rows = [{**{name: part[name] for name in of_case}, **row} for part in parts for row in part["rows"]]
    shared = {name: value for name, value in parts[0].items() if all(part[name] == value for part in parts)}
    return {**shared, "benchmark": phase, "rows": rows}
