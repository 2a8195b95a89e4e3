"""``ladder trace plan``: the timeline of a planned run. The main command line mounts ``trace_app`` beside recorded runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from .commands import HardwareFiles, Json, load_hardware

trace_app = typer.Typer(help="Timelines: Chrome/Perfetto JSON and one SVG picture.", add_completion=False, no_args_is_help=True)


@trace_app.callback()
def _root() -> None:
    """A callback keeps ``plan`` a command of its own while it is the only one."""


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
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for trace.json and timeline.svg.")] = Path("trace"),
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
