"""``ladder trace``: the timeline of a recorded run (``ladder trace --tp 2 ...``) or of a planned one (``ladder trace plan``)."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from ..config import Wiring
from ..presets import ModelShape
from .commands import HardwareFiles, Json, load_hardware


class _RecordByDefault(TyperGroup):
    """``ladder trace --tp 2`` means ``ladder trace run --tp 2``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0].startswith("-") and args[0] not in ctx.help_option_names:
            args = ["run", *args]
        return super().parse_args(ctx, args)


trace_app = typer.Typer(
    cls=_RecordByDefault,
    help="Timelines: Chrome/Perfetto JSON and one SVG picture. Options without a command record a run.",
    add_completion=False,
    no_args_is_help=True,
)
Out = Annotated[Path, typer.Option("--out", "-o", help="Folder for trace.json and timeline.svg.")]


def check_request(*, source: str, layers: int | None, wirings: Sequence[str], batch: int, prompt: int, steps: int) -> None:
    """What is wrong with a request, said before any rank is started."""
    for name, number in (("steps", steps), ("batch", batch), ("prompt", prompt)):
        if number < 1:
            raise ValueError(f"--{name} must be at least 1, got {number}")
    parallel = [spec for spec in wirings if spec.lower().startswith("parallel")]
    if parallel and len(parallel) < len(wirings):
        raise ValueError("parallel layers have one norm, the others two: record parallel in a run of its own")
    if Path(source).is_dir():
        if layers is not None:
            raise ValueError("--layers is for published shapes; a checkpoint is recorded whole")
        return
    shape = ModelShape.from_name(source)
    for spec in wirings:
        Wiring.parse(spec, shape.num_layers if layers is None else layers)


@trace_app.command("run")
def trace_recorded(
    model: Annotated[str, typer.Option(help="Checkpoint directory, or a published shape (random weights).")] = "ladder-1b",
    layers: Annotated[int | None, typer.Option(help="Use only so many layers of a published shape.")] = None,
    tp: Annotated[int | None, typer.Option("--tp", help="Ranks; starts them unless torchrun has.")] = 2,
    latency: Annotated[str, typer.Option(help="Emulated latency of a sum: e.g. 500us, 3ms; 0 takes the link as it is.")] = "0",
    batch: Annotated[int, typer.Option()] = 1,
    prompt: Annotated[int, typer.Option(help="Tokens of context.")] = 16,
    wirings: Annotated[str, typer.Option(help="With commas between, e.g. standard,ladder,desync-2x.")] = "standard,ladder",
    steps: Annotated[int, typer.Option(help="Decode steps recorded; the one of median length is drawn.")] = 5,
    dtype: Annotated[str, typer.Option(help="auto (as stored), float32, bfloat16 or float16.")] = "float32",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    out: Out = Path("trace"),
    profiles: Annotated[bool, typer.Option("--profiles", help="Also keep torch.profiler's own trace of every rank.")] = False,
    as_json: Json = False,
) -> None:
    """Record a decode step of every wiring on real ranks with torch.profiler."""
    from ..bench.commands import read_seconds, split_wirings
    from ..launch import on_ranks

    names, seconds = split_wirings(wirings), read_seconds(latency)
    if seconds is None:
        raise ValueError("a recorded run needs a latency in numbers, such as 3ms, or 0 for the link as it is")
    check_request(source=model, layers=layers, wirings=names, batch=batch, prompt=prompt, steps=steps)
    if tp == 1:
        raise ValueError("there is nothing to wait for with one rank: record with --tp 2")
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # the profiler's own notes of its start and end; read as torch is loaded
    on_ranks(tp)
    from ..parallel import distributed
    from ..trace_run import record

    with distributed(device) as world:
        result = record(
            world,
            source=model,
            layers=layers,
            wirings=names,
            latency=seconds,
            batch=batch,
            prompt=prompt,
            steps=steps,
            dtype=dtype,
            folder=out,
            profiles=profiles,
        )
        if world.is_main:
            if as_json:
                print(json.dumps(result))
                return
            print(result["setting"])
            for row in result["wirings"]:
                hidden = ", ".join(f"{percent:.0f} %" for percent in row["hidden_percent"])
                print(
                    f"  {row['wiring']:18} {row['layer_us'] / 1e3:7.2f} ms per layer, {row['step_ms']:7.2f} ms per step, "
                    f"hidden on rank 0 to {len(row['hidden_percent']) - 1}: {hidden} "
                    f"(median of {steps} steps: {row['median_hidden_percent']:.0f} %)"
                )
            print(f"wrote {result['trace']} and {result['timeline']}")


@trace_app.command("engine")
def trace_engine(
    model: Annotated[str, typer.Option(help="A published shape (random weights).")] = "llama-3-70b",
    layers: Annotated[int, typer.Option(help="Use only so many of its layers.")] = 8,
    tp: Annotated[int, typer.Option("--tp", help="This GPU holds one rank of so many.")] = 8,
    link: Annotated[
        str, typer.Option(help="Emulated all-reduce: 24us, 24us+launch, alpha=12,beta=90 or a measured table.")
    ] = "24us",
    wirings: Annotated[str, typer.Option(help="With commas between.")] = "standard,ladder",
    context: Annotated[int, typer.Option(help="Tokens in the cache.")] = 1280,
    schedule: Annotated[str, typer.Option(help="one or two lanes, or auto: the faster of them.")] = "auto",
    out: Out = Path("trace"),
    as_json: Json = False,
) -> None:
    """Record the kernels of the CUDA engine's decode step on one GPU; all-reduces are emulated."""
    from ..bench.commands import split_wirings
    from ..trace_engine import record_engine

    asked = {"model": model, "layers": layers, "tp": tp, "link": link, "context": context, "schedule": schedule}
    result = record_engine(**asked, wirings=split_wirings(wirings), folder=out)  # type: ignore[arg-type]
    if as_json:
        print(json.dumps(result))
        return
    print(result["setting"])
    for row in result["wirings"]:
        print(
            f"  {row['wiring']:18} {row['layer_us']:7.1f} us per layer, {row['hidden_percent']:3.0f} % of the communication hidden"
        )
    print(f"wrote {result['trace']} and {result['timeline']}")


@trace_app.command("plan")
def trace_planned(
    model: Annotated[str, typer.Option(help="Preset, directory with config.json, or hub id.")] = "llama-3-70b",
    device: Annotated[str, typer.Option()] = "h100",
    tp: Annotated[int, typer.Option(help="Tensor-parallel ranks.")] = 8,
    link: Annotated[str, typer.Option()] = "nccl",
    batch: Annotated[int, typer.Option()] = 1,
    prompt: Annotated[int, typer.Option()] = 1024,
    new: Annotated[int, typer.Option()] = 512,
    engine: Annotated[str | None, typer.Option(help="Engine profile: fused, compiled, paper, cpu.")] = None,
    wirings: Annotated[str, typer.Option(help="With commas between, e.g. standard,ladder,parallel.")] = "standard,ladder",
    prefill: Annotated[bool, typer.Option("--prefill", help="The prefill instead of a decode step.")] = False,
    out: Out = Path("trace"),
    hardware: HardwareFiles = None,
    as_json: Json = False,
) -> None:
    """Write trace.json (chrome://tracing, ui.perfetto.dev) and timeline.svg of a simulated forward pass."""
    from .planner import make_cases
    from .trace import planned_panel, write_trace

    asked = {"device": device, "tp": [tp], "link": [link], "batch": [batch], "prompt": prompt, "new": new}
    [(name, case)] = make_cases(model, **asked, engine_name=engine, hardware=load_hardware(hardware))  # type: ignore[arg-type]
    panels = [planned_panel(case, wiring.strip(), prefill=prefill) for wiring in wirings.split(",")]
    kind = "prefill" if prefill else "decode step"
    where = f"{name} on {case.device.title}, tp {tp}, {link}, batch {batch}"
    setting = f"{where}, one {kind}, engine {case.engine.name}; planned, not measured"
    trace, picture = write_trace(panels, {"setting": setting, "label": "planned"}, out)
    if as_json:
        facts = [{"wiring": p.title, "layer_us": p.layer_us, "hidden_percent": p.hidden_percent} for p in panels]
        print(json.dumps({"trace": str(trace), "timeline": str(picture), "label": "planned", "wirings": facts}))
        return
    print(setting)
    for panel in panels:
        print(
            f"  {panel.title:18} {panel.layer_us:7.1f} us per layer, {panel.hidden_percent:3.0f} % of the communication hidden"
        )
    print(f"wrote {trace} and {picture}")
