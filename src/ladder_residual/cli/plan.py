"""``ladder plan`` and ``ladder plan validate``: parse, call, print. The main command line mounts ``app``."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(help="Predict what a wiring gives on a machine, without a GPU.", add_completion=False)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")]
HardwareFiles = Annotated[
    list[Path] | None, typer.Option("--hardware", help="TOML file with [devices.NAME] and [links.NAME]; may be repeated.")
]


def numbers(text: str, option: str) -> list[int]:
    """``2,4,8`` -> [2, 4, 8]."""
    parts = [part.strip() for part in text.split(",")]
    if not all(re.fullmatch(r"[0-9]{1,7}", part) and int(part) > 0 for part in parts):
        raise ValueError(f"--{option} takes whole numbers above 0 with commas between, such as 2,4,8; got {text!r}")
    return [int(part) for part in parts]


def load_hardware(files: list[Path] | None) -> Any:
    from .hardware import shipped

    hardware = shipped()
    for file in files or []:
        hardware = hardware.extended(file)
    return hardware


@app.callback(invoke_without_command=True)
def plan_command(
    context: typer.Context,
    model: Annotated[str | None, typer.Option(help="Preset, directory with config.json, or hub id.")] = None,
    device: Annotated[
        str, typer.Option(help="a100, h100, h200, b200, l40s, rtx-pro-6000, rtx-4090, rtx-3090, cpu-server ...")
    ] = "h100",
    tp: Annotated[str, typer.Option(help="Tensor-parallel ranks, e.g. 2,4,8.")] = "8",
    link: Annotated[str, typer.Option(help="Links, e.g. nccl,one-shot,nccl-no-p2p,ib-2-nodes,10gbe.")] = "nccl",
    batch: Annotated[str, typer.Option(help="Batch sizes, e.g. 1,16.")] = "1",
    prompt: Annotated[int, typer.Option(help="Prompt tokens of each sequence.")] = 1024,
    new: Annotated[int, typer.Option(help="New tokens of each sequence.")] = 512,
    engine: Annotated[str | None, typer.Option(help="Engine profile: fused, compiled, paper, cpu.")] = None,
    hardware: HardwareFiles = None,
    hybrid: Annotated[bool, typer.Option("--hybrid", help="Draw speed-up against the number of converted layers.")] = False,
    catalogue: Annotated[bool, typer.Option("--list", help="List models, devices, links and engines, and stop.")] = False,
    as_json: Json = False,
) -> None:
    """Tokens/s, memory and speed-up of every wiring, and one sentence of advice."""
    if context.invoked_subcommand is not None:
        return
    known = load_hardware(hardware)
    if catalogue:
        _print_catalogue(known, as_json)
        return
    if model is None:
        raise ValueError(
            "say which model: --model llama-3-70b, a directory with config.json, or a hub id (--list shows the presets)"
        )
    from .advice import advise
    from .planner import hybrid_curve, make_cases, plan

    asked: dict[str, Any] = {
        "device": device,
        "tp": numbers(tp, "tp"),
        "link": [name.strip() for name in link.split(",")],
        "batch": numbers(batch, "batch"),
        "prompt": prompt,
        "new": new,
        "engine_name": engine,
        "hardware": known,
    }
    rows = plan(model, **asked)
    cases = [case for _, case in make_cases(model, **asked)]
    advice = [advise(row, case) for row, case in zip(rows, cases, strict=True)]
    curves = [hybrid_curve(case) if row.fits else [] for row, case in zip(rows, cases, strict=True)] if hybrid else []
    if as_json:
        found = [{**row.to_dict(), "advice": text} for row, text in zip(rows, advice, strict=True)]
        for row_dict, curve in zip(found, curves, strict=False):
            row_dict["hybrid"] = [{"converted_layers": k, "speedup": gain} for k, gain in curve]
        print(json.dumps({"kind": "plan", "label": "planned", "rows": found}))
        return
    from .text import print_curve, print_plan

    print_plan(rows, cases[0])
    for row, curve in zip(rows, curves, strict=False):
        if curve:
            print_curve(row, curve)
    for text in advice:
        print(text)


def _print_catalogue(hardware: Any, as_json: bool) -> None:
    from ..presets import presets
    from .cost import engines

    document = {
        "models": {name: f"{shape.parameters / 1e9:.1f}B, {shape.num_layers} layers" for name, shape in presets().items()},
        "devices": {name: device.title for name, device in hardware.devices.items()},
        "links": {name: row["title"] for name, row in hardware.link_rows.items()},
        "engines": {name: profile.title for name, profile in engines().items()},
    }
    if as_json:
        print(json.dumps(document))
        return
    for kind, entries in document.items():
        print(kind)
        for name, title in entries.items():
            print(f"  {name:22} {title}")


def result_files(given: list[Path] | None, usual: list[Path]) -> list[Path]:
    """The files given (a directory means its JSON files), or the usual ones."""
    if given is None:
        return usual
    return [file for path in given for file in (sorted(path.glob("*.json")) if path.is_dir() else [path])]


@app.command("validate")
def validate_command(
    engine_results: Annotated[
        list[Path] | None, typer.Option("--engine-results", help="Emulated-rank results; default: results/engine/*.json.")
    ] = None,
    overlap_results: Annotated[
        list[Path] | None,
        typer.Option("--overlap-results", help="`ladder bench overlap` results; default: results/overlap/*.json."),
    ] = None,
    hardware: HardwareFiles = None,
    constants: Annotated[
        bool, typer.Option("--constants", help="List the fitted constants and what they were fitted on.")
    ] = False,
    refit: Annotated[
        bool, typer.Option("--refit", help="Fit the constants again and show them beside the shipped ones.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Compare the model with the paper and with measurements; exit code 1 above the bounds."""
    from .points import repository_results
    from .validate import validate

    engine_files, overlap_files = repository_results()
    result = validate(
        result_files(engine_results, engine_files),
        result_files(overlap_results, overlap_files),
        load_hardware(hardware),
    )
    document = result.to_dict()
    if refit:
        from .fit import fit

        document["refit"] = {**fit("paper"), **fit("emulated")}
    if as_json:
        print(json.dumps(document))
    else:
        from .text import print_constants, print_validation

        print_validation(result)
        if constants or refit:
            print_constants(document.get("refit"))
    if not result.passed:
        raise typer.Exit(1)
