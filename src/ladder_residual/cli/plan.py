"""``ladder plan``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from ..common.terminal import show
from .options import Json, split_links, whole_numbers

HardwareFiles = Annotated[
    list[Path] | None, typer.Option("--hardware", help="TOML file with tables devices.NAME and links.NAME; may be repeated.")
]


def plan(
    model: Annotated[str | None, typer.Option(help="Preset, directory with config.json, or hub id.")] = None,
    device: Annotated[
        str, typer.Option(help="a100, h100, h200, b200, l40s, rtx-pro-6000, rtx-4090, rtx-3090, cpu-server ...")
    ] = "h100",
    tp: Annotated[str, typer.Option(help="Tensor-parallel ranks, e.g. 2,4,8.")] = "8",
    link: Annotated[str, typer.Option(help="Links, e.g. nccl,one-shot,nccl-no-p2p,ib-2-nodes,10gbe,24us.")] = "nccl",
    batch: Annotated[str, typer.Option(help="Batch sizes, e.g. 1,16.")] = "1",
    prompt: Annotated[int, typer.Option(help="Prompt tokens of each sequence.")] = 1024,
    new: Annotated[int, typer.Option(help="New tokens of each sequence.")] = 512,
    engine: Annotated[str | None, typer.Option(help="Engine profile: fused, compiled, paper, cpu.")] = None,
    weights: Annotated[
        str | None,
        typer.Option(help="Of the layers' matrices: bf16, fp8, int4.", show_default="as config.json says, else bf16"),
    ] = None,
    kv_cache_dtype: Annotated[str, typer.Option(help="bf16 or fp8.")] = "bf16",
    hardware: HardwareFiles = None,
    hybrid: Annotated[bool, typer.Option("--hybrid", help="Draw speed-up against the number of converted layers.")] = False,
    wide: Annotated[
        bool, typer.Option("--wide", help="Every column and the bars of every case, however wide the terminal is.")
    ] = False,
    catalogue: Annotated[bool, typer.Option("--list", help="List models, devices, links and engines, and stop.")] = False,
    as_json: Json = False,
) -> None:
    """Predict tokens/s, memory and speed-up of every wiring on a machine, without a GPU."""
    from ..plan.api import plan as run
    from ..plan.api import with_files
    from ..plan.planner import hybrid_curve

    known = with_files(hardware or [])
    if catalogue:
        _print_catalogue(known, as_json)
        return
    if model is None:
        raise ValueError(
            "say which model: --model llama-3-70b, a directory with config.json, or a hub id (--list shows the presets)"
        )
    rows = run(
        model,
        device=device,
        tp=whole_numbers(tp, "tp"),
        link=split_links(link),
        batch=whole_numbers(batch, "batch"),
        prompt=prompt,
        new=new,
        engine=engine,
        weights=weights,
        kv_cache_dtype=kv_cache_dtype,
        hardware=known,
    )
    curves = [hybrid_curve(row.case) if hybrid and row.fits else [] for row in rows]
    if as_json:
        documents = [row.to_dict() for row in rows]
        for document, curve in zip(documents, curves, strict=True):
            if hybrid:
                document["hybrid"] = [{"converted_layers": k, "speedup": gain} for k, gain in curve]
        print(json.dumps({"kind": "plan", "label": "planned", "rows": documents}))
        return
    from ..plan.text import print_curve, print_plan

    print_plan(rows, wide=wide)
    for row, curve in zip(rows, curves, strict=True):
        if curve:
            print_curve(row, curve)


def _print_catalogue(hardware: Any, as_json: bool) -> None:
    from ..models.presets import presets
    from ..plan.cost import engines

    document = {
        "models": {name: f"{shape.parameters / 1e9:.1f}B, {shape.num_layers} layers" for name, shape in presets().items()},
        "devices": {name: device.title or name for name, device in hardware.devices.items()},
        "links": {name: link.title or name for name, link in hardware.links.items()},
        "engines": {name: profile.title for name, profile in engines().items()},
    }
    if as_json:
        print(json.dumps(document))
        return
    for kind, entries in document.items():
        print(kind)
        for name, title in entries.items():
            show(f"  {name:22} {title}")
