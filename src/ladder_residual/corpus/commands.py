"""``ladder data prepare / inspect / sample``: parse, call, print. The main command line mounts ``app``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    help="Training text: prepare it, look at it, or let a model write it.", no_args_is_help=True, add_completion=False
)


@app.command("sample")
def sample_command(
    source: Annotated[str, typer.Argument(metavar="MODEL", help="Checkpoint directory or hub id.")],
    out: Annotated[Path, typer.Argument(metavar="OUT.jsonl", help="File to write, a sample a line.")],
    tokens: Annotated[int, typer.Option(help="Stop after the batch that reaches this many.")],
    batch: Annotated[int, typer.Option(help="Rows sampled side by side; thousands on a GPU.")] = 64,
    length: Annotated[int, typer.Option(help="Most tokens of a sample, its beginning included.")] = 512,
    temperature: Annotated[float, typer.Option()] = 1.0,
    seed: Annotated[int, typer.Option(help="The same seed gives the same samples on the same device.")] = 0,
    start: Annotated[
        str, typer.Option(help="plain: documents; chat: the model writes the user's turn and its answer; mixed: half and half.")
    ] = "plain",
    random_first: Annotated[
        bool, typer.Option("--random-first", help="Begin plain samples with a random word of the vocabulary: more variety.")
    ] = False,
    write: Annotated[str, typer.Option(help="ids, text or both.")] = "both",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto (as stored), float32, bfloat16 or float16.")] = "auto",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file that is there.")] = False,
) -> None:
    """Let a model write the text to heal it with. Every batch is on disk before the next begins: Ctrl-C loses only one."""
    from .sample import SampleSettings

    settings = SampleSettings(
        tokens=tokens,
        batch=batch,
        length=length,
        temperature=temperature,
        seed=seed,
        start=start,
        random_first=random_first,
        write=write,
    )
    if out.exists() and not overwrite:
        raise ValueError(f"{out} exists; choose another name or use --overwrite")
    from ..parallel import distributed
    from .sample import Sampler, load_for_sampling, write_samples

    with distributed(device) as world:
        if world.size > 1:
            raise ValueError(
                f"sampling is done by one process; {world.size} were started. Start one per GPU, each with its --seed"
            )
        model, tokenizer = load_for_sampling(source, world, dtype)
        sampler = Sampler(model, tokenizer, settings)
        memory = sampler.memory
        print(
            f"cache {memory.cache / 2**30:.2f} GiB, sampling {memory.work / 2**30:.2f} GiB, on {world.device}",
            file=sys.stderr,
        )
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (
            TextColumn("tokens"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.description}"),
            TimeElapsedColumn(),
        )
        try:
            with out.open("w", encoding="utf-8") as sink, Progress(*columns, console=Console(stderr=True)) as bar:
                task = bar.add_task("", total=tokens)
                totals = write_samples(
                    sampler,
                    sink,
                    lambda done: bar.update(task, completed=done),
                    lambda step, rows: bar.update(task, description=f"token {step} of {length}, {rows} rows going"),
                )
        except OSError as error:
            raise ValueError(f"cannot write {out}: {error}") from error
    print(
        f"{out}: {totals['rows']} samples ({totals['complete']} ended by themselves), {totals['tokens']} tokens "
        f"in {totals['seconds']:.1f} s, {totals['tokens_per_second']:.0f} tokens/s"
    )
