"""``ladder train RECIPE`` and ``ladder train export``: parse, call, print. Everything heavy is imported inside."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from ..distributed import shared_gpu
from .options import Json, RunByDefault, ShareGpu

app = typer.Typer(
    cls=RunByDefault,
    help="Train from scratch as a recipe says (ladder train RECIPE.toml), or export what was trained.",
    no_args_is_help=True,
    add_completion=False,
)


@app.command("run")
def run_command(
    recipe: Annotated[Path, typer.Argument(help="A recipe.toml.")],
    changes: Annotated[
        list[str] | None, typer.Option("--set", metavar="A.B=VALUE", help="Change the recipe; may be repeated.")
    ] = None,
    ranks: Annotated[
        int | None, typer.Option(help="Start so many processes on this host; on several hosts use torchrun.")
    ] = None,
    share_gpu: ShareGpu = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Memory, steps, tokens and time on the recipe's ranks; nothing is trained.")
    ] = False,
    resume: Annotated[str, typer.Option(help="auto: go on from the newest good checkpoint, if any; never.")] = "auto",
    stop_after: Annotated[int | None, typer.Option(help="End after so many steps, as a time limit would.")] = None,
    device: Annotated[str, typer.Option(help="Of --dry-run: a device of `ladder plan --list`.")] = "h100",
    link: Annotated[str, typer.Option(help="Of --dry-run: between the tensor-parallel ranks.")] = "nccl",
    network: Annotated[str, typer.Option(help="Of --dry-run: between the copies of the model.")] = "ib-2-nodes",
    as_json: Json = False,
) -> None:
    """Train a recipe: on this process, on --ranks processes, or on those torchrun started."""
    from ..train.recipe import Recipe

    loaded = Recipe.load(recipe, changes or [])
    if dry_run:
        from ..train.dry_run import estimate, to_text

        plan = estimate(loaded, ranks=ranks, device=device, link=link, network=network)
        print(json.dumps(plan) if as_json else to_text(plan))
        return
    from ..distributed.launch import launch, launched, speaks_first
    from ..train.corpora import check_corpora

    shared_gpu.share_gpu(share_gpu)
    if ranks is not None and ranks < 1:
        raise ValueError(f"--ranks must be at least 1, got {ranks}")
    if speaks_first():
        check_corpora(loaded)
    if ranks is not None and ranks > 1 and launched() == 1:
        raise SystemExit(launch(sys.argv[1:], ranks))
    from ..train.loop import train

    result = train(loaded, resume=resume, stop_after=stop_after)
    if result.pop("main"):
        print(json.dumps(result) if as_json else _to_text(result))
    if result["stopped"]:
        from ..distributed.launch import STOPPED

        raise typer.Exit(STOPPED)


def _to_text(result: dict[str, Any]) -> str:
    lines = [f"{result['directory']}: step {result['step']}"]
    if result["valid"]:
        lines.append(f"validation loss {result['valid']['loss']:.4f} over {result['valid']['labels']:,} tokens")
    if "export" in result:
        lines.append(f"exported to {result['export']}")
    return "\n".join(lines)


@app.command("export")
def export_command(
    run: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="The directory of a run.")],
    target: Annotated[Path, typer.Argument(metavar="OUT", help="Hugging Face directory to write.")],
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16; default: as the run computed.")] = None,
    tokenizer: Annotated[str | None, typer.Option(help="Another tokenizer than the training data's.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace what is there.")] = False,
) -> None:
    """Write a run's newest checkpoint as a Hugging Face directory, for `ladder generate`, `eval`, `convert` and everyone else."""
    from ..train.export import export

    checkpoint = export(run, target, dtype=dtype, overwrite=overwrite, tokenizer=tokenizer)
    print(f"{target}: written from {checkpoint}")
