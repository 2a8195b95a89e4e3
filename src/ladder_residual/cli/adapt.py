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


def option(name: str, text: str, *flags: str) -> Any:
    """An option that says the default of its setting."""
    default = getattr(AdaptSettings, name)
    shown = f"{default:g}" if isinstance(default, float) else default
    return typer.Option(*flags, help=f"{text}; default: {shown}.")


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
    heldout: Annotated[
        list[str] | None,
        typer.Option(help="Text to measure on, never trained on; may be repeated; default: 5 % of the rows of --data."),
    ] = None,
    out: Annotated[str | None, typer.Option(help="Directory for the result; default: STUDENT-recovered.")] = None,
    method: Annotated[str | None, option("method", choices(Method))] = None,
    control: Annotated[
        bool, typer.Option("--control", help="Train the unchanged model instead, everything else alike.")
    ] = False,
    tokens: Annotated[int | None, typer.Option(help="How many tokens to train on; default: --epochs of the data.")] = None,
    epochs: Annotated[float | None, option("epochs", "Passes over the data")] = None,
    sequence: Annotated[
        int | None, typer.Option(help="Tokens of a row; default: 1024, or the student's context if that is shorter.")
    ] = None,
    batch_tokens: Annotated[int | None, option("batch_tokens", "Tokens of an optimizer step, over all ranks")] = None,
    micro_rows: Annotated[
        int | None, typer.Option(help="Rows at a time on a device, the rest is accumulated; default: all of a step.")
    ] = None,
    learning_rate: Annotated[float | None, option("learning_rate", "Peak of the schedule", "--learning-rate", "--lr")] = None,
    schedule: Annotated[str | None, option("schedule", choices(Schedule))] = None,
    warmup: Annotated[float | None, option("warmup", "Share of the steps, or their number if 1 or more")] = None,
    optimizer: Annotated[str | None, option("optimizer", choices(Optimizer))] = None,
    weight_decay: Annotated[float | None, option("weight_decay", "Of the optimizer")] = None,
    temperature: Annotated[float | None, option("temperature", "Of both distributions in distillation")] = None,
    top_k: Annotated[int | None, option("top_k", "Compare the teacher's k likeliest words, 0 the whole vocabulary")] = None,
    data_weight: Annotated[float | None, option("data_weight", "Weight of the text's own loss beside the teacher")] = None,
    hidden_weight: Annotated[float | None, option("hidden_weight", "Weight of matching the teacher's hidden states")] = None,
    stage: Annotated[
        list[str] | None, typer.Option(help="Progressive conversion: wirings on the way to the student's own, in order.")
    ] = None,
    stages_share: Annotated[float | None, option("stages_share", "Share of the run until the last stage is reached")] = None,
    anneal: Annotated[
        float | None, typer.Option(help="Share of the run over which all layers go from standard to ladder; default: at once.")
    ] = None,
    anneal_kl: Annotated[float | None, option("anneal_kl", "KL to the teacher above which the annealing pauses")] = None,
    lora_rank: Annotated[int | None, option("lora_rank", "Rank of the adapters of --method lora")] = None,
    merge: Annotated[
        bool | None,
        typer.Option(
            "--merge/--no-merge",
            help="Merge what --method lora trained, or write it alone; default: merge into plain weights.",
        ),
    ] = None,
    too_long: Annotated[str | None, option("too_long", f"Chats longer than a row: {choices(TooLong)}")] = None,
    parallel: Annotated[str | None, option("parallel", f"Under torchrun: {choices(Parallel)} (auto is ddp)")] = None,
    precision: Annotated[str | None, option("precision", f"{choices(Precision)} (auto is bf16 on a GPU)")] = None,
    compile: Annotated[
        bool | None, typer.Option("--compile/--no-compile", help="torch.compile, pays on a GPU; default: no.")
    ] = None,
    gradient_checkpointing: Annotated[
        bool | None, typer.Option("--checkpointing/--no-checkpointing", help="Less memory, a third more compute; default: no.")
    ] = None,
    save_every: Annotated[int | None, option("save_every", "Steps between checkpoints, 0 only at the end")] = None,
    keep: Annotated[int | None, option("keep", "Checkpoints kept, at least 2")] = None,
    log_every: Annotated[int | None, option("log_every", "Steps between two logged losses")] = None,
    evaluate_every: Annotated[
        int | None,
        option("evaluate_every", "Steps between measurements on the held-out text, 0 before and after"),
    ] = None,
    seed: Annotated[int | None, option("seed", "Of the order of the rows")] = None,
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
    from ..adapt.preflight import check_settings

    check_settings(settings)
    from ..adapt.run import adapt as start
    from ..common.terminal import show
    from ..distributed.world import distributed

    with distributed(device) as world:
        result = start(settings, world, lambda line: show(line, sys.stderr))
        if world.is_main and not result.stopped:
            seen = f"{result.share_of_text_percent:.0f} % of the text"
            print(f"{result.steps} steps, {result.tokens:,} tokens ({seen}), {result.seconds:.1f} s: {result.output}")
            for line in result.sentences():
                print(f"  {line}")
    if result.stopped:
        from ..distributed.launch import STOPPED

        raise typer.Exit(STOPPED)
