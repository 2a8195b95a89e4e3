"""``ladder convert``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..common.terminal import show
from ..distributed.launch import on_ranks, speaks_first
from .options import Device, Ranks, Source


def convert(
    source: Source,
    target: Annotated[Path, typer.Argument(help="Directory to write.")],
    wiring: Annotated[
        str | None,
        typer.Option(help="e.g. ladder, ladder:last-half, ladder:16-31, desync-2x; standard is the way back; auto chooses."),
    ] = None,
    quantize: Annotated[
        str | None,
        typer.Option(
            metavar="FORMAT",
            help="fp8 or int4: round the layers' projections, to the nearest number or, with --refit, with far less loss.",
        ),
    ] = None,
    copy: Annotated[bool, typer.Option("--copy/--link", help="Copy the weights instead of linking them.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a checkpoint that is there.")] = False,
    layers: Annotated[int | None, typer.Option(help="With auto: how many layers to convert.")] = None,
    budget: Annotated[
        float | None, typer.Option(help="With auto: by how many nats the loss may rise, before any recovery training.")
    ] = None,
    calibration: Annotated[str | None, typer.Option(help="With auto: text to choose the layers on (.txt, .jsonl).")] = None,
    check: Annotated[
        str | None, typer.Option(help="With auto: text to check the choice on; default: the rest of the calibration text.")
    ] = None,
    calibration_tokens: Annotated[int | None, typer.Option(help="With auto; default: 2048 on a CPU, 65536 on a GPU.")] = None,
    refit: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT", help="Refit the projections to what they now read, on a text (.txt, .jsonl); no gradients."
        ),
    ] = None,
    refit_tokens: Annotated[int | None, typer.Option(help="With --refit; default: 30720 on a CPU, 262144 on a GPU.")] = None,
    tp: Ranks = None,
    device: Device = "auto",
) -> None:
    """Rewire a checkpoint: its config changes, its weights stay, unless they are to be refitted or quantised. An adapter is merged."""
    from ..adapt.auto import Request
    from ..adapt.refit_checkpoint import check_refit
    from ..models.adapter import is_adapter
    from ..models.checkpoint_reader import resolve
    from ..models.convert import check_target
    from ..models.preflight import check_source
    from ..models.quantization.write import checked_format

    options = {"--layers": layers, "--budget": budget, "--calibration": calibration, "--check": check}
    if wiring is None and quantize is None and not is_adapter(resolve(source)):
        raise ValueError(
            "nothing to convert: give --wiring ladder, ladder:last-half ... (auto chooses), --quantize fp8 or int4, or both"
        )
    if refit_tokens is not None and refit is None:
        raise ValueError(f"--refit-tokens {refit_tokens} belongs to --refit TEXT")
    if tp is not None and (refit is None or wiring == "auto"):
        raise ValueError(f"--tp {tp} is for --refit with a wiring that is named: converting and choosing take one process")
    if tp is not None and quantize is not None:
        raise ValueError(f"--quantize with --refit takes one process: leave out --tp {tp}")
    _check_file("--refit", refit)

    def write(spec: str | None) -> None:
        from ..models.convert import convert as run
        from ..models.convert import describe

        if refit is None:
            describe(run(source, target, spec, copy=copy, overwrite=overwrite, quantize=quantize), show)
            return
        if speaks_first():
            check_refit(source, target, spec, overwrite, quantize)
        on_ranks(tp, preload="ladder_residual.adapt.refit")
        from ..adapt.refit_checkpoint import refit as run_refit
        from ..distributed.world import distributed

        with distributed(device) as world:
            result = run_refit(
                source,
                target,
                spec,
                refit,
                quantize=quantize,
                tokens=refit_tokens,
                device=device,
                overwrite=overwrite,
                log=show,
            )
            if world.is_main:
                result.describe(show)
                describe(result.conversion, show)

    if wiring != "auto":
        if given := [name for name, value in options.items() if value is not None]:
            raise ValueError(f"{', '.join(given)} belong to --wiring auto; with --wiring {wiring} the layers are named already")
        write(wiring)
        return
    if calibration is None:
        raise ValueError("--wiring auto measures what each layer costs: give it a text with --calibration FILE")
    Request(calibration, layers, budget, check, calibration_tokens)  # refuses what cannot be asked for
    _check_file("--calibration", calibration)
    _check_file("--check", check)
    if quantize is not None:
        checked_format(check_source(source), quantize)
    if refit is not None:
        check_refit(source, target, "ladder", overwrite, quantize)
    check_target(source, target, overwrite)
    from ..adapt.api import select_layers

    selection = select_layers(
        source,
        calibration,
        layers=layers,
        budget=budget,
        check=check,
        tokens=calibration_tokens,
        refit=refit,
        refit_tokens=refit_tokens,
        device=device,
    )
    selection.explain(show)
    write(selection.wiring)
    selection.save(target, show)


def _check_file(option: str, file: str | None) -> None:
    if file == "":
        raise ValueError(f"{option} is empty: name a text file")
    if file is not None and Path(file).suffix in (".txt", ".jsonl") and not Path(file).is_file():
        raise ValueError(f"{option} {file}: no such file")
