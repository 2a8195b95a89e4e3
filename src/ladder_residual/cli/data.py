"""``ladder data prepare / inspect / sample``: parse, call, print. The main command line mounts ``app``."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer

from ..common.fields import fields_from
from ..common.files import cannot_write, check_can_write
from ..common.locks import Lock
from ..common.terminal import show
from ..distributed.launch import launched
from ..models.preflight import check_source
from .options import Device, Dtype, Json

app = typer.Typer(
    help="Training text: prepare it, look at it, or let a model write it.", no_args_is_help=True, add_completion=False
)


@app.command("prepare")
def prepare_command(
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="SOURCE...",
            help="Text (.txt), JSON lines (.jsonl), either also .xz, .gz or .bz2; .parquet; a directory of those; "
            "or a hub dataset, OWNER/NAME or hub:NAME, with @REVISION and :SUBSET if wanted.",
        ),
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Directory for the shards.")],
    tokenizer: Annotated[str, typer.Option(help="Directory, hub id or tokenizer.json.")],
    text_field: Annotated[
        list[str] | None,
        typer.Option(help="Field with the text; repeated, fields are joined by a line break.", show_default="text"),
    ] = None,
    document_separator: Annotated[
        str | None, typer.Option(help="A line of a text file that ends a document; without it a file is one document.")
    ] = None,
    end_of_document: Annotated[
        str | None, typer.Option(help="Token after every document; default: <|endoftext|> where there is one, else eos.")
    ] = None,
    shard_tokens: Annotated[int, typer.Option(help="A shard ends with the document that brings it to this.")] = 1 << 26,
    limit: Annotated[int | None, typer.Option(help="Documents to take, from the start.")] = None,
    split: Annotated[str, typer.Option(help="Of a hub dataset.")] = "train",
    subset: Annotated[str | None, typer.Option(help="Of a hub dataset: its configuration.")] = None,
    workers: Annotated[int | None, typer.Option(help="Processes that tokenise; default: one per core.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Start again, dropping what is there.")] = False,
) -> None:
    """Tokenise text into memory-mapped shards. Interrupted, the same command goes on where it stopped."""
    import os

    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    from ..data.prepare import PrepareSettings, Report, check_request, prepare
    from ..data.sources import SourceOptions

    settings = PrepareSettings(
        text_fields=tuple(text_field or ["text"]),
        shard_tokens=shard_tokens,
        limit=limit,
        end_of_document=end_of_document,
        options=SourceOptions(document_separator, split, subset),
    )
    check_request(sources, out, tokenizer, settings)
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    try:
        with Progress(*columns, console=Console(stderr=True)) as bar:
            task = bar.add_task("preparing", total=None)

            def show(report: Report) -> None:
                words = f"{report.documents:,} documents, {report.tokens:,} tokens"
                bar.update(task, description=words, completed=report.bytes_read, total=report.bytes_total)

            corpus = prepare(
                sources, out, tokenizer, settings, workers=workers or os.cpu_count() or 1, overwrite=overwrite, report=show
            )
    except KeyboardInterrupt:
        print(f"interrupted: finished shards are kept in {out}; the same command goes on after them", file=sys.stderr)
        raise
    print(f"{out}: {corpus.documents:,} documents, {corpus.tokens:,} tokens ({corpus.dtype}) in {len(corpus.shards)} shards")


@app.command("inspect")
def inspect_command(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A corpus of `ladder data prepare`.")],
    verify: Annotated[bool, typer.Option("--verify", help="Read everything and compare checksums.")] = False,
    document: Annotated[int, typer.Option(help="Number of the document to show.")] = 0,
    as_json: Json = False,
) -> None:
    """Sizes of a corpus, and the beginning of a document."""
    import json

    from ..data.corpus import Corpus

    corpus = Corpus.open(directory, "checksums" if verify else "sizes")
    if as_json:
        print(json.dumps(corpus.index()))
        return
    print(f"tokens      {corpus.tokens:,} ({corpus.dtype}), vocabulary {corpus.vocab_size:,}")
    print(f"documents   {corpus.documents:,}, {corpus.tokens / corpus.documents:,.0f} tokens each on average")
    print(f"shards      {len(corpus.shards)}, " + ("checksums right" if verify else "sizes right; --verify reads them"))
    show(f"tokenizer   {corpus.tokenizer.get('source')} (digest {corpus.tokenizer.get('digest')})")
    ids = corpus.document(document)[:64]
    print(f"document {document}  {' '.join(map(str, ids[:16]))} ...")
    if text := _decoded(ids.tolist(), corpus.tokenizer):
        print(f"            {text!r}")


def _decoded(ids: list[int], about: dict[str, str]) -> str | None:
    """The text of ``ids``, if the tokenizer is still where it was."""
    from ..data.tokenizer import read_tokenizer, tokenizer_digest

    try:
        tokenizer = read_tokenizer(about["source"])
    except (KeyError, ValueError):
        return None
    return str(tokenizer.decode(ids)) if tokenizer_digest(tokenizer) == about.get("digest") else None


@app.command("sample")
def sample_command(
    source: Annotated[str, typer.Argument(metavar="MODEL", help="Checkpoint directory or hub id.")],
    out: Annotated[Path, typer.Argument(metavar="OUT.jsonl", help="File to write, a sample a line.")],
    tokens: Annotated[int, typer.Option(help="Stop after the batch that reaches this many.")],
    batch: Annotated[int, typer.Option(help="Rows sampled side by side; thousands on a GPU.")] = 64,
    length: Annotated[int, typer.Option(help="Most tokens of a sample, its beginning included.")] = 512,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 1.0,
    seed: Annotated[int, typer.Option(help="The same seed gives the same samples on the same device.")] = 0,
    start: Annotated[
        str, typer.Option(help="plain: documents; chat: the model writes the user's turn and its answer; mixed: half and half.")
    ] = "plain",
    random_first: Annotated[
        bool, typer.Option("--random-first", help="Begin plain samples with a random word of the vocabulary: more variety.")
    ] = False,
    write: Annotated[str, typer.Option(help="ids, text or both.")] = "both",
    device: Device = "auto",
    dtype: Dtype = "auto",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file that is there.")] = False,
) -> None:
    """Let a model write text to train it on. Every batch is on disk before the next begins: Ctrl-C loses only one."""
    from ..data.sample_settings import SampleSettings

    settings = fields_from(SampleSettings, locals())
    if (ranks := launched()) > 1:
        raise ValueError(f"sampling is done by one process; {ranks} were started. Start one per GPU, each with its --seed")
    if out.exists() and not overwrite:
        raise ValueError(f"{out} exists; choose another name or use --overwrite")
    check_can_write(out)
    if not out.absolute().parent.is_dir():
        raise ValueError(cannot_write(out, f"there is no directory {out.parent}"))
    check_source(source, dtype=dtype)
    from ..data.sample import Sampler, load_for_sampling, write_samples
    from ..distributed.world import distributed

    # A pipe or device has no place for a lock beside it.
    lock = Lock(out) if out.is_file() or not out.exists() else nullcontext()
    with lock, distributed(device) as world:
        model, tokenizer = load_for_sampling(source, world, dtype)
        sampler = Sampler(model, tokenizer, settings)
        cache, work = sampler.memory.cache / 2**30, sampler.memory.work / 2**30
        print(f"cache {cache:.2f} GiB, sampling {work:.2f} GiB, on {world.device}", file=sys.stderr)
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
