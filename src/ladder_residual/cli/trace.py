"""``ladder trace``: the timeline of a recorded run (``ladder trace --tp 2 ...``) or of a planned one (``ladder trace plan``)."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from ..common.files import check_can_write
from ..common.units import read_seconds
from ..distributed import shared_gpu
from ..distributed.launch import on_ranks
from .options import Device, Dtype, Json, MeasuredRanks, RunByDefault, ShareGpu, Wirings, split_wirings
from .plan import HardwareFiles

app = typer.Typer(
    cls=RunByDefault,
    help="Timelines: Chrome/Perfetto JSON and one SVG picture. Options without a command record a run.",
    add_completion=False,
    no_args_is_help=True,
)
Out = Annotated[Path, typer.Option("--out", "-o", help="Folder for trace.json and timeline.svg.")]


@app.command("run")
def trace_recorded(
    model: Annotated[str, typer.Option(help="Checkpoint directory, or a published shape (random weights).")] = "ladder-1b",
    layers: Annotated[int | None, typer.Option(help="Use only so many layers of a published shape.")] = None,
    tp: MeasuredRanks = 2,
    share_gpu: ShareGpu = False,
    latency: Annotated[
        str, typer.Option(help="Emulated latency of an all-reduce: e.g. 500us, 3ms; 0 takes the link as it is.")
    ] = "0",
    batch: Annotated[int, typer.Option(help="Sequences decoded together.")] = 1,
    prompt: Annotated[int, typer.Option(help="Tokens of context.")] = 16,
    wirings: Wirings = "standard,ladder",
    steps: Annotated[int, typer.Option(help="Decode steps recorded; the one of median length is drawn.")] = 5,
    dtype: Dtype = "float32",
    device: Device = "auto",
    out: Out = Path("trace"),
    profiles: Annotated[bool, typer.Option("--profiles", help="Also keep torch.profiler's own trace of every rank.")] = False,
    as_json: Json = False,
) -> None:
    """Record a decode step of every wiring on real ranks with torch.profiler."""
    names, seconds = split_wirings(wirings), read_seconds(latency)
    if seconds is None:
        raise ValueError("a recorded run needs a latency in numbers, such as 3ms, or 0 for the link as it is")
    from ..trace.request import check_request

    asked: dict[str, Any] = {"source": model, "layers": layers, "wirings": names}
    asked |= {"batch": batch, "prompt": prompt, "steps": steps}
    check_request(**asked, tp=tp)
    check_can_write(out)
    shared_gpu.share_gpu(share_gpu)
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # the profiler's own notes of its start and end; read as torch is loaded
    on_ranks(tp)
    from ..distributed.world import distributed
    from ..trace.record import record

    with distributed(device) as world:
        result = record(world, **asked, latency=seconds, dtype=dtype, folder=out, profiles=profiles)
        if world.is_main:
            _tell(result, as_json)


@app.command("engine")
def trace_engine(
    model: Annotated[str, typer.Option(help="A published shape (random weights).")] = "llama-3-70b",
    layers: Annotated[int, typer.Option(help="Use only so many of its layers.")] = 8,
    tp: Annotated[int, typer.Option("--tp", help="This GPU holds one rank of so many.")] = 8,
    link: Annotated[
        str, typer.Option(help="Emulated all-reduce: 24us, 24us,no-pdl, alpha=12,beta=90 or a measured table.")
    ] = "24us",
    wirings: Wirings = "standard,ladder",
    context: Annotated[int, typer.Option(help="Tokens in the cache.")] = 1280,
    schedule: Annotated[str, typer.Option(help="serial or two_stream, or auto: the faster of them.")] = "auto",
    out: Out = Path("trace"),
    as_json: Json = False,
) -> None:
    """Record the kernels of the CUDA engine's decode step on one GPU; all-reduces are emulated."""
    from ..trace.engine import record_engine

    asked = {"model": model, "layers": layers, "tp": tp, "link": link, "context": context, "schedule": schedule}
    _tell(record_engine(**asked, wirings=split_wirings(wirings), folder=out), as_json)  # type: ignore[arg-type]


@app.command("plan")
def trace_planned(
    model: Annotated[str, typer.Option(help="Preset, directory with config.json, or hub id.")] = "llama-3-70b",
    device: Annotated[str, typer.Option(help="As `ladder plan --list` names it.")] = "h100",
    tp: Annotated[int, typer.Option(help="Tensor-parallel ranks.")] = 8,
    link: Annotated[str, typer.Option(help="As `ladder plan --list` names it, or 24us.")] = "nccl",
    batch: Annotated[int, typer.Option(help="Sequences decoded together.")] = 1,
    prompt: Annotated[int, typer.Option(help="Prompt tokens of each sequence.")] = 1024,
    new: Annotated[int, typer.Option(help="New tokens of each sequence.")] = 512,
    engine: Annotated[str | None, typer.Option(help="Engine profile: fused, compiled, paper, cpu.")] = None,
    wirings: Wirings = "standard,ladder",
    prefill: Annotated[bool, typer.Option("--prefill", help="The prefill instead of a decode step.")] = False,
    out: Out = Path("trace"),
    hardware: HardwareFiles = None,
    as_json: Json = False,
) -> None:
    """Write trace.json (chrome://tracing, ui.perfetto.dev) and timeline.svg of a simulated forward pass."""
    from ..plan.api import with_files
    from ..plan.planner import make_cases
    from ..trace.panel import planned_panel, write_trace

    asked = {"device": device, "tp": [tp], "link": [link], "batch": [batch], "prompt": prompt, "new": new}
    [(name, case)] = make_cases(model, **asked, engine_name=engine, hardware=with_files(hardware or []))  # type: ignore[arg-type]
    panels = [planned_panel(case, wiring, prefill=prefill) for wiring in split_wirings(wirings)]
    kind = "prefill" if prefill else "decode step"
    where = f"{name} on {case.device.title}, tp {tp}, {link}, batch {batch}"
    setting = f"{where}, one {kind}, engine {case.engine.name}; planned, not measured"
    about = {"setting": setting, "label": "planned"}
    trace, picture = write_trace(panels, about, out)
    files = {"trace": str(trace), "timeline": str(picture)}
    _tell({**about, **files, "wirings": [panel.facts() for panel in panels]}, as_json)


def _tell(result: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(result))
        return
    print(result["setting"])
    for row in result["wirings"]:
        if "median_hidden_percent" in row:  # real ranks, several steps
            hidden = ", ".join(f"{percent:.0f} %" for percent in row["hidden_percent"])
            said = f"{row['layer_us'] / 1e3:7.2f} ms per layer, {row['step_ms']:7.2f} ms per step, "
            said += f"hidden on rank 0 to {len(row['hidden_percent']) - 1}: {hidden} "
            said += f"(median of {result['recorded_steps']} steps: {row['median_hidden_percent']:.0f} %)"
        else:
            said = f"{row['layer_us']:7.1f} us per layer, {row['hidden_percent']:3.0f} % of the communication hidden"
        print(f"  {row['wiring']:18} {said}")
    print(f"wrote {result['trace']} and {result['timeline']}")
