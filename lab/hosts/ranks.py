"""What each host's rank measures: the all-reduces of this link, then decode and prefill steps of every wiring.

python -m lab.hosts.ranks OPTIONS_AS_JSON      # under torchrun
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ladder_residual.bench.overlap import measure_overlap
from ladder_residual.common.environment import environment
from ladder_residual.distributed.launch import run_command
from ladder_residual.distributed.link_probe import probe_link, reducer_for_link
from ladder_residual.distributed.world import World, distributed
from ladder_residual.models.random_weights import load_or_random_model

# Of each phase: what depends on the link and the phase. The rest is the same in all of them.
_OF_A_PHASE = (
    "phase",
    "batch",
    "prompt",
    "message_bytes",
    "all_reduces_per_step",
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
    decode: Sequence[int] | None,
    prefill: Sequence[int] | None,
    repeats: int,
    comm_dtype: str,
    small_allreduce: str,
) -> dict[str, Any]:
    """``decode`` and ``prefill`` are (sequences, tokens of each): of context, or read in one step."""
    probe = probe_link(world)
    reducer = reducer_for_link(world, small_allreduce=small_allreduce, comm_dtype=comm_dtype)
    model = load_or_random_model(source, world, layers=layers, dtype=dtype, uneven=uneven)
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
        "comm_dtype": "bfloat16" if comm_dtype == "bf16" else str(model.dtype).removeprefix("torch."),
        "small_allreduce": small_allreduce,
        "repeats": repeats,
        **environment(),
        "link_probe": probe.to_dict(),
        "phases": phases,
    }


def parameters_of(source: str, layers: int | None) -> int:
    from dataclasses import replace

    from ladder_residual.models.checkpoint_reader import read_json
    from ladder_residual.models.presets import ModelShape

    if Path(source).is_dir():
        return ModelShape.from_hf(read_json(Path(source) / "config.json")).parameters
    shape = ModelShape.from_name(source)
    return (replace(shape, num_layers=layers) if layers else shape).parameters


def main() -> None:
    with distributed("cpu") as world:
        result = measure_on_ranks(world, **json.loads(sys.argv[1]))
        if world.is_main:
            print(json.dumps(result))


if __name__ == "__main__":
    run_command(main)
