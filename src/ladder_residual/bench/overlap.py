"""How much of the communication each wiring hides: decode steps of one model over a link of chosen latency, on real ranks.

Wirings are measured in one run, interleaved, so that a busy machine slows all of them alike. Two bounds frame the result: the
step without any communication (compute), and the sums of a step done back to back (communication). Standard takes about their
sum; nothing that sends the same messages can be faster than the larger one.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.cache_utils import DynamicCache

from ..candidates import GREEDY
from ..config import Wiring
from ..families import family_of
from ..loading import DTYPES, load_model, place_parameters, restore_buffers, set_reducers
from ..memory import require
from ..model import decoder_layers, ladder_classes, place_layers
from ..parallel import World
from ..presets import ModelShape
from ..reduce import Reducer
from ..sharding import Cut, check_divides
from .environment import environment

COMPUTE = "no-comm"  # the wiring whose time is the compute bound


def random_model(
    shape: ModelShape,
    world: World,
    dtype: torch.dtype = torch.float32,
    *,
    uneven: bool = False,
    reducer: Reducer | None = None,
) -> PreTrainedModel:
    """This rank's share of a Llama of ``shape`` with random weights: for measurements of speed only."""
    config_class, _ = ladder_classes("llama")
    config = config_class(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        tie_word_embeddings=shape.tied_embeddings,
        max_position_embeddings=131072,
    )
    from ..families import FAMILIES

    check_divides(shape, FAMILIES["llama"], world.size, uneven)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    need = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters()) / world.size
    require(
        need, world.device, f"a rank of {shape.num_layers} random layers", "use a smaller --model, fewer --layers or more ranks"
    )
    restore_buffers(model, world.device)
    generator = torch.Generator(world.device).manual_seed(world.rank)

    def draw(name: str, whole: tuple[int, ...], cut: Cut | None) -> torch.Tensor:
        local = cut.local_shape(whole) if cut else whole
        if len(local) == 1:
            return torch.ones(local, dtype=dtype, device=world.device)
        return torch.empty(local, dtype=dtype, device=world.device).normal_(0, 0.02, generator=generator)

    place_parameters(model, draw, shape, FAMILIES["llama"], world)
    set_reducers(model, reducer or world.reducer())
    return model.eval()


class _Decoder:
    """One wiring's running sequence. The model's weights are shared by all wirings; only the placement of its layers changes."""

    def __init__(
        self, model: PreTrainedModel, spec: str, reducer: Reducer, batch: int, prompt: int, device: torch.device
    ) -> None:
        self.model, self.reducer = model, reducer
        self.wiring = Wiring.parse(spec, model.config.num_hidden_layers)
        self.cache = DynamicCache(config=model.config)
        generator = torch.Generator().manual_seed(0)
        self.token = torch.randint(0, model.config.vocab_size, (batch, prompt), generator=generator).to(device)
        self.prompt = prompt
        self.norms: list[tuple[Any, str, Any]] = []
        if name := family_of(model.config.to_dict()).mlp_norm:
            if any(not hasattr(layer, name) for layer in decoder_layers(model)):
                raise ValueError("the checkpoint's wiring is parallel: its layers lack a norm that the other wirings need")
            self.norms = [(layer, name, getattr(layer, name)) for layer in decoder_layers(model)]

    def step(self) -> None:
        self.rewire()
        self.forward()

    def forward(self) -> None:
        logits = self.model(self.token, past_key_values=self.cache, use_cache=True, logits_to_keep=1).logits
        self.token = logits[:, -1:].argmax(-1)

    def rewire(self) -> None:
        for layer, name, norm in self.norms:  # a parallel wiring before this one has taken them away
            setattr(layer, name, norm)
        self.model.config.wiring = self.wiring.spec
        place_layers(self.model)
        set_reducers(self.model, self.reducer)

    def rewind(self) -> None:
        """Back to the end of the prompt, so that every measured step sees the same context."""
        surplus = self.cache.get_seq_length() - self.prompt
        if surplus > 0:
            self.cache.crop(-surplus)


class _Prefill(_Decoder):
    """Every step reads the whole prompt anew."""

    def forward(self) -> None:
        self.model(self.token, use_cache=False, logits_to_keep=1)


class _EndToEnd(_Decoder):
    """Every step reads the prompt anew and writes ``new`` tokens after it."""

    new = 1

    def forward(self) -> None:
        cache, token = DynamicCache(config=self.model.config), self.token
        for _ in range(self.new):
            logits = self.model(token, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
            token = logits[:, -1:].argmax(-1)


PHASES: dict[str, type[_Decoder]] = {"decode": _Decoder, "prefill": _Prefill, "e2e": _EndToEnd}


def _sync(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _communication(reducer: Reducer, message: torch.Tensor, count: int, repeats: int, world: World) -> list[float]:
    times = []
    for _ in range(repeats):
        world.barrier()
        start = time.perf_counter()
        for _ in range(count):
            reducer.start(message).wait()
        _sync(world.device)
        times.append(time.perf_counter() - start)
    return times


def _agree(seconds: list[float], world: World) -> list[float]:
    """A step is over when the slowest rank is: the largest time of each repeat."""
    if world.size == 1:
        return seconds
    stacked = torch.tensor(seconds, dtype=torch.float64, device=world.device)
    world.settle()
    torch.distributed.all_reduce(stacked, op=torch.distributed.ReduceOp.MAX, group=world.group)
    return stacked.tolist()


def _summary(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    quartiles = statistics.quantiles(ordered, n=4)
    return {"median_ms": 1e3 * statistics.median(ordered), "p25_ms": 1e3 * quartiles[0], "p75_ms": 1e3 * quartiles[2]}


def _shorter_module(decoder: _Decoder, model: Any) -> float:
    """Seconds the shorter of a layer's two modules computes: the largest latency that a ladder can hide entirely."""
    layer = model.base_model.layers[len(model.base_model.layers) // 2]
    family = layer.placement.family
    medians = []
    for name in (family.attention, family.mlp):
        module, started = getattr(layer, name), [0.0]
        times: list[float] = []
        hooks = [
            module.register_forward_pre_hook(lambda *_, started=started: started.__setitem__(0, time.perf_counter())),
            module.register_forward_hook(
                lambda *_, started=started, times=times: times.append(time.perf_counter() - started[0])
            ),
        ]
        for _ in range(10):
            decoder.rewind()
            decoder.step()
        for hook in hooks:
            hook.remove()
        medians.append(statistics.median(times))
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
    """Steps of every wiring, interleaved. ``latency`` is the emulated time of a sum in seconds; None picks the time of one
    module (the shorter one of a layer). ``reducer`` replaces the default one where no latency is emulated. A step of phase
    ``e2e`` is a prompt and ``new`` tokens."""
    if world.size < 2:
        raise ValueError("hiding sums over ranks needs at least two of them: run with --tp 2")
    if phase not in PHASES:
        raise ValueError(f"unknown phase {phase!r}; choose {', '.join(PHASES)}")
    if new < 1:
        raise ValueError(f"new must be at least 1, got {new}")
    if repeats < 5:
        raise ValueError(f"repeats must be at least 5 to say anything about spread, got {repeats}")
    config = model.config
    modules = 2 * config.num_hidden_layers
    names = list(dict.fromkeys(["standard", *wirings, COMPUTE]))
    plain = reducer or world.reducer()

    def decoders(reducer: Reducer, specs: list[str]) -> dict[str, _Decoder]:
        made = {spec: PHASES[phase](model, spec, reducer, batch, prompt, world.device) for spec in specs}
        for decoder in made.values():
            if isinstance(decoder, _EndToEnd):
                decoder.new = new
            for _ in range(3):  # the prompt, then two steps to warm up
                decoder.step()
        return made

    def rounds(made: dict[str, _Decoder], count: int) -> dict[str, list[float]]:
        times: dict[str, list[float]] = {spec: [] for spec in made}
        for _ in range(count):
            for spec, decoder in made.items():
                decoder.rewind()
                decoder.rewire()
                world.barrier()
                start = time.perf_counter()
                decoder.forward()
                _sync(world.device)
                times[spec].append(time.perf_counter() - start)
        return {spec: _agree(seconds, world) for spec, seconds in times.items()}

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
        once = statistics.median(_agree(_communication(reducer, message, modules, 10, world), world))
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
                **_summary(times[spec]),
                "tokens_per_s": batch * tokens / step,
                "speedup": standard / step,
                "over_bound": step / bound,
                "hidden_percent": 100 * (standard - step) / exposed if exposed > 0 else None,
            }
        )
    return {
        "benchmark": "overlap",
        "phase": phase,
        "link": f"this host's link + {1e6 * latency:.0f} us emulated latency per sum"
        if latency
        else "this host's link as it is",
        "latency_us": 1e6 * latency,
        "tp": world.size,
        "batch": batch,
        "prompt": prompt,
        "layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "sums_per_step": modules * len(passes),
        "message_bytes": message.numel() * message.element_size(),
        "compute_ms": 1e3 * compute,
        "communication_ms": 1e3 * communication,
        "bound_ms": 1e3 * bound,
        "repeats": repeats,
        "rows": rows,
        **environment(),
    }


def markdown_table(result: dict[str, Any]) -> str:
    """The rows of a result, for README and docs."""
    lines = ["| wiring | ms per step | tokens/s | speed-up | communication hidden |", "|---|---|---|---|---|"]
    for row in result["rows"]:
        name = "no communication (bound)" if row["wiring"] == COMPUTE else row["wiring"]
        share = "" if row["wiring"] in ("standard", COMPUTE) else f"{row['hidden_percent']:.0f} %"
        lines.append(
            f"| {name} | {row['median_ms']:.1f} ({row['p25_ms']:.1f}-{row['p75_ms']:.1f}) | {row['tokens_per_s']:.1f} "
            f"| {row['speedup']:.2f}x | {share} |"
        )
    lines.append("")
    lines.append(
        f"{result['date']}, {result['machine']}, {result['link']}, torch {result['torch']}; compute {result['compute_ms']:.1f} ms, "
        f"communication {result['communication_ms']:.1f} ms a step."
    )
    return "\n".join(lines) + "\n"


def model_of(
    source: str, world: World, *, layers: int | None = None, dtype: str = "float32", uneven: bool = False
) -> PreTrainedModel:
    """This rank's share of a checkpoint directory, or of a published shape with random weights and perhaps fewer layers."""
    if Path(source).is_dir():
        if layers is not None:
            raise ValueError(f"--layers {layers} shortens a published shape; {source} is a checkpoint and measured whole")
        return load_model(source, world, dtype=dtype, uneven=uneven)
    if dtype not in DTYPES:
        raise ValueError(f"random weights have no dtype of their own: got {dtype!r}, choose {', '.join(DTYPES)}")
    shape = ModelShape.from_name(source)
    return random_model(replace(shape, num_layers=layers) if layers else shape, world, DTYPES[dtype], uneven=uneven)


def run(
    world: World,
    *,
    source: str,
    layers: int | None = None,
    wirings: list[str],
    latency: float | None,
    batch: int,
    prompt: int,
    repeats: int,
    dtype: str = "float32",
    phase: str = "decode",
    new: int = 1,
) -> dict[str, Any]:
    """The command: ``source`` is a checkpoint directory or the name of a published shape (random weights)."""
    model = model_of(source, world, layers=layers, dtype=dtype)
    result = measure_overlap(
        world, model=model, wirings=wirings, latency=latency, batch=batch, prompt=prompt, repeats=repeats, phase=phase, new=new
    )
    return {"model": source, "weights": "checkpoint" if Path(source).is_dir() else "random", **result}
