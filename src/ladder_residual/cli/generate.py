"""``ladder generate``."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer

from ..common.fields import fields_from
from ..common.progress import progress
from ..common.terminal import show
from ..distributed import shared_gpu
from ..distributed.launch import launched, on_ranks, speaks_first
from .options import CommDtype, GenerationOptions, MaxTokens, SmallAllreduce, Source, at_least_one, expanded


@expanded
def generate(
    source: Source,
    *,
    prompt: Annotated[
        str | None, typer.Option("--prompt", "-p", help="The text to go on from, or to answer; '-' reads standard input.")
    ] = None,
    file: Annotated[Path | None, typer.Option(help="Prompts: a line each, or .jsonl with prompt / messages.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Where completions of --file go, as JSONL.", show_default="standard output")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Keep the completions in --out and do the rest.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an --out that is there.")] = False,
    raw: Annotated[
        bool,
        typer.Option("--raw", "--no-chat-template", help="Take --prompt as it is, also where the model has a chat template."),
    ] = False,
    max_new_tokens: MaxTokens = 128,
    num_beams: Annotated[int, typer.Option(help="Beams of a beam search; 1 is none.")] = 1,
    batch_size: Annotated[int, typer.Option(help="Prompts of --file per batch.")] = 8,
    emulate: Annotated[
        str | None,
        typer.Option(
            help="Compute as rank 0 of ranks that do not exist, to measure speed: tp=8,link=h200-nccl or tp=8,link=24us."
        ),
    ] = None,
    comm_dtype: CommDtype = "same",
    small_allreduce: SmallAllreduce = "fixed",
    options: GenerationOptions,
) -> None:
    """Generate text from a prompt (streamed) or from a file of prompts."""
    from ..common.line_writer import LineWriter, silent
    from ..common.locks import Lock
    from ..generation.prompts import as_text, parse_prompts
    from ..generation.request import LoadOptions, check_request
    from ..generation.results import check_new, kept_completions
    from ..generation.sampling import Sampling
    from ..links import parse_emulation

    if (prompt is None) == (file is None):
        raise ValueError("give either --prompt TEXT or --file FILE")
    if out is None and (resume or overwrite):
        raise ValueError(f"--{'resume' if resume else 'overwrite'} is for --out FILE: give one, or leave it out")
    if out is not None and file is None:
        raise ValueError("--out takes the completions of --file; a single --prompt goes to standard output")
    if out is not None and file is not None and out.resolve() == file.resolve():
        raise ValueError(f"--out and --file are the same file ({out}): the prompts would be overwritten")
    tp = options.tp
    at_least_one(tp=tp, batch_size=batch_size)
    shared_gpu.share_gpu(options.share_gpu)
    emulation = parse_emulation(emulate) if emulate is not None else None
    if emulation and tp is not None:
        raise ValueError(f"--emulate {emulate} brings its own tp: leave out --tp {tp}")
    if prompt == "-" and (tp or 1) > 1:
        raise ValueError("--prompt - reads standard input, which only one process has: use --file, or leave out --tp")
    given = vars(options) | locals()
    sampling, loading = fields_from(Sampling, given), fields_from(LoadOptions, given)
    asked: Any = parse_prompts(file) if file is not None else [sys.stdin.read() if prompt == "-" else str(prompt)]
    first = speaks_first()
    if first:
        ranks = tp or launched()
        found = check_request(source, sampling, loading, tp=ranks, device=options.device)
        if out is not None:
            check_new(out, resume=resume, overwrite=overwrite)
        where = f"{ranks} ranks" if ranks > 1 else "one process"
        print(f"loading {source} ({found.family.model_type}, {found.wiring.spec}) on {where}", file=sys.stderr, flush=True)
    with Lock(out) if first and out is not None else nullcontext(), _says_what_is_kept(out, len(asked)):
        on_ranks(tp, preload="ladder_residual.generation.session")
        from ..distributed.world import distributed
        from ..generation.session import Session

        with distributed(options.device, options.timeout) as world:
            session = Session(source, world, sampling, loading)
            prompts, are_chats = as_text(asked, session.tokenizer, template=file is None and not raw)
            done = world.broadcast(kept_completions(out, prompts) if resume and out is not None and world.is_main else 0)
            if done == len(prompts):
                if world.is_main:
                    print(f"{done} of {len(prompts)} completions are in {out}: nothing is left to do", file=sys.stderr)
                return
            session.load_for(prompts, batch_size)
            if world.is_main:
                how = "in the model's chat template (--raw leaves it out)" if are_chats else "as it is"
                print(f"ready; the prompt is taken {how}" if file is None else "ready", file=sys.stderr, flush=True)
            label = {"emulated": str(emulation)} if emulation else {}
            if emulation:
                print(f"{emulation}: the other ranks' partials are missing, so the text means nothing", file=sys.stderr)
            if file is not None:
                sink = LineWriter(out, append=resume) if world.is_main else silent()
                shown = world.is_main and out is not None
                bar = progress("completions", len(prompts), done) if shown else nullcontext(lambda note: None)
                with sink, bar as step:
                    for completion in session.complete(prompts, batch_size=batch_size, chat=are_chats, done=done):
                        sink.write(completion.to_json(**label))
                        step(f"{session.watch.rate:.0f} tokens/s")
            else:
                streamed = num_beams == 1
                for completion in session.complete(prompts, stream=streamed, chat=are_chats):
                    if world.is_main and not streamed:
                        show(completion.text if are_chats else completion.prompt + completion.text)
            if world.is_main:
                into = f", completions in {out}" if out is not None else ""
                print(session.summary() + into, file=sys.stderr)


@contextmanager
def _says_what_is_kept(out: Path | None, total: int) -> Iterator[None]:
    """After Ctrl-C, here or in the ranks."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit) as stop:
        by_hand = isinstance(stop, KeyboardInterrupt) or stop.code == 130
        if by_hand and speaks_first():
            from ..generation.results import count_completions

            kept = f": {count_completions(out)} of {total} completions are in {out}, --resume does the rest" if out else ""
            print(f"\nstopped{kept}", file=sys.stderr)
        raise
