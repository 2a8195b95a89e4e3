"""``ladder adapt``: parse, call, print."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from ..adapt.settings import (
    AdaptSettings,
    DataSource,
    Method,
    Optimizer,
    Parallel,
    Precision,
    Schedule,
    TooLong,
    check_installed,
    choices,
    from_mapping,
    read_recipe,
)
from .options import Device


def adapt(
    source: Annotated[str, typer.Argument(metavar="STUDENT|RECIPE.toml", help="Converted checkpoint, or a recipe file.")],
    teacher: Annotated[str | None, typer.Option(help="The original model: directory or hub id.")] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            help="Text to learn from: .txt, .jsonl, a corpus directory, owner/name (read as far as --tokens asks); may be repeated."
        ),
    ] = None,
    weight: Annotated[list[float] | None, typer.Option(help="Share of each --data, in the same order.")] = None,
    heldout: Annotated[list[str] | None, typer.Option(help="Text to measure on, never trained on; may be repeated.")] = None,
    out: Annotated[str | None, typer.Option(help="Directory for the result; default: STUDENT-recovered.")] = None,
    method: Annotated[str | None, typer.Option(help=f"{choices(Method)}.")] = None,
    control: Annotated[
        bool, typer.Option("--control", help="Train the unchanged model instead, everything else alike.")
    ] = False,
    tokens: Annotated[int | None, typer.Option(help="How many tokens to train on; default: --epochs of the data.")] = None,
    epochs: Annotated[float | None, typer.Option(help="Passes over the data; default: 1.")] = None,
    sequence: Annotated[int | None, typer.Option(help="Tokens of a row.")] = None,
    batch_tokens: Annotated[int | None, typer.Option(help="Tokens of an optimizer step, over all ranks.")] = None,
    micro_rows: Annotated[int | None, typer.Option(help="Rows at a time on a device; the rest is accumulated.")] = None,
    learning_rate: Annotated[float | None, typer.Option("--learning-rate", "--lr", help="Peak; default: 3e-4.")] = None,
    schedule: Annotated[str | None, typer.Option(help=f"{choices(Schedule)}.")] = None,
    warmup: Annotated[float | None, typer.Option(help="Share of the steps, or their number if 1 or more.")] = None,
    optimizer: Annotated[str | None, typer.Option(help=f"{choices(Optimizer)}.")] = None,
    weight_decay: Annotated[float | None, typer.Option(help="Default: 0.")] = None,
    temperature: Annotated[float | None, typer.Option(help="Of both distributions in distillation.")] = None,
    top_k: Annotated[
        int | None, typer.Option(help="Compare the teacher's k likeliest words; 0 is the whole vocabulary.")
    ] = None,
    data_weight: Annotated[float | None, typer.Option(help="Weight of the text's own loss beside the teacher.")] = None,
    hidden_weight: Annotated[float | None, typer.Option(help="Weight of matching the teacher's hidden states.")] = None,
    stage: Annotated[
        list[str] | None, typer.Option(help="Progressive conversion: wirings on the way to the student's own, in order.")
    ] = None,
    stages_share: Annotated[float | None, typer.Option(help="Share of the run until the last stage is reached.")] = None,
    lora_rank: Annotated[int | None, typer.Option(help="Default: 16.")] = None,
    too_long: Annotated[str | None, typer.Option(help=f"Chats longer than a row: {choices(TooLong)}.")] = None,
    parallel: Annotated[str | None, typer.Option(help=f"Under torchrun: {choices(Parallel)} (auto is ddp).")] = None,
    precision: Annotated[str | None, typer.Option(help=f"{choices(Precision)} (auto: bf16 on a GPU).")] = None,
    compile: Annotated[bool | None, typer.Option("--compile/--no-compile", help="torch.compile; pays on a GPU.")] = None,
    gradient_checkpointing: Annotated[
        bool | None, typer.Option("--checkpointing/--no-checkpointing", help="Less memory, a third more compute.")
    ] = None,
    save_every: Annotated[int | None, typer.Option(help="Steps between checkpoints.")] = None,
    keep: Annotated[int | None, typer.Option(help="Checkpoints kept, at least 2.")] = None,
    log_every: Annotated[int | None, typer.Option(help="Steps between two logged losses; default: 10.")] = None,
    evaluate_every: Annotated[int | None, typer.Option(help="Steps between measurements on --heldout.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of the order of the rows; default: 0.")] = None,
    resume: Annotated[
        bool, typer.Option("--resume/--no-resume", help="Go on from the last checkpoint if there is one.")
    ] = True,
    device: Device = "auto",
    show: Annotated[bool, typer.Option("--show", help="Only print the settings of the run as JSON.")] = False,
) -> None:
    """Recover a converted model: distil the original into it, or train it on text; one process, or torchrun with DDP or FSDP2."""
    given = {
        name: value
        for name, value in locals().items()
        if name not in ("source", "data", "weight", "stage", "heldout", "device", "show", "resume", "control")
        and value is not None
    }
    lists: dict[str, Any] = {"stages": stage, "heldout": heldout}
    given |= {name: tuple(value) for name, value in lists.items() if value}
    if data:
        if weight and len(weight) != len(data):
            raise ValueError(f"{len(data)} --data but {len(weight)} --weight: give one for each, or none")
        given["data"] = [DataSource(path, share) for path, share in zip(data, weight or [1.0] * len(data), strict=True)]
    if control:
        given["control"] = True
    given["resume"] = resume
    settings = (
        read_recipe(Path(source), given)
        if source.endswith(".toml")
        else from_mapping({"student": source, **given}, "ladder adapt")
    )
    if show:
        import json
        from dataclasses import asdict

        print(json.dumps(asdict(settings), indent=2))
        return
    run(settings, device)


def run(settings: AdaptSettings, device: str) -> None:
    check_installed()
    from ..adapt.run import adapt as start
    from ..distributed.world import distributed

    with distributed(device) as world:
        result = start(settings, world, lambda line: print(line, file=sys.stderr, flush=True))
        if world.is_main and not result.stopped:
            seen = f"{result.share_of_text_percent:.0f} % of the text"
            print(f"{result.steps} steps, {result.tokens:,} tokens ({seen}), {result.seconds:.1f} s: {result.output}")
            for line in result.sentences():
                print(f"  {line}")
    if result.stopped:
        from ..distributed.launch import STOPPED

        raise typer.Exit(STOPPED)
