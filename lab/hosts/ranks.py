"""What each host's rank does in ``ladder bench hosts``: time the sums of this link, then decode and prefill steps of every wiring."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...link_probe import chosen_reducer, probe_link
from ...parallel import World
from ..environment import environment
from ..overlap import measure_overlap, model_of

# Of each phase: what depends on the link and the phase. The rest is the same in all of them.
_OF_A_PHASE = (
    "phase",
    "batch",
    "prompt",
    "message_bytes",
    "sums_per_step",
    "compute_ms",
    "communication_ms",
    "bound_ms",
    "rows",
)


def measure_on_ranks(
    world: World,
    *,
    source: str,
    layers: int | None,
    dtype: str,
    uneven: bool,
    wirings: list[str],
    decode: tuple[int, int] | None,
    prefill: tuple[int, int] | None,
    repeats: int,
    wire: str,
    exchange: str,
) -> dict[str, Any]:
    """``decode`` and ``prefill`` are (sequences, tokens of each): of context, or read in one step."""
    sums = probe_link(world)
    reducer = chosen_reducer(world, exchange=exchange, wire=wire)
    model = model_of(source, world, layers=layers, dtype=dtype, uneven=uneven)
    phases = []
    for phase, size in (("decode", decode), ("prefill", prefill)):
        if size is not None:
            batch, prompt = size
            options: dict[str, Any] = {"batch": batch, "prompt": prompt, "repeats": repeats, "phase": phase}
            result = measure_overlap(world, model=model, wirings=wirings, latency=0.0, reducer=reducer, **options)
            phases.append({key: result[key] for key in _OF_A_PHASE})
    return {
        "model": Path(source).name if Path(source).is_dir() else source,
        "weights": "checkpoint" if Path(source).is_dir() else "random",
        "parameters": parameters_of(source, layers),
        "dtype": str(model.dtype).removeprefix("torch."),
        "layers": model.config.num_hidden_layers,
        "hidden_size": model.config.hidden_size,
        "tp": world.size,
        "uneven": uneven,
        "partials_travel_as": "bfloat16" if wire == "bf16" else str(model.dtype).removeprefix("torch."),
        "exchange": exchange,
        "repeats": repeats,
        **environment(),
        "sums": sums.to_dict(),
        "phases": phases,
    }


def parameters_of(source: str, layers: int | None) -> int:
    from dataclasses import replace

    from ...checkpoint import read_json
    from ...presets import ModelShape

    if Path(source).is_dir():
        return ModelShape.from_hf(read_json(Path(source) / "config.json")).parameters
    shape = ModelShape.from_name(source)
    return (replace(shape, num_layers=layers) if layers else shape).parameters
