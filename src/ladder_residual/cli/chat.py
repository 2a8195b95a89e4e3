"""``ladder chat``."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from ..common.fields import fields_from
from ..distributed import shared_gpu
from ..distributed.launch import launched, on_ranks, speaks_first
from .options import GenerationOptions, MaxTokens, Source, at_least_one, expanded


@expanded
def chat(
    source: Source,
    *,
    system: Annotated[str | None, typer.Option(help="System message, before the first question.")] = None,
    max_new_tokens: MaxTokens = 512,
    context: Annotated[int, typer.Option(help="Tokens the CUDA engine's cache holds.")] = 8192,
    options: GenerationOptions,
) -> None:
    """Talk with a model that has a chat template. An empty line or end of input ends it."""
    from ..generation.request import LoadOptions, check_chat, check_request
    from ..generation.sampling import Sampling

    at_least_one(tp=options.tp, context=context)
    shared_gpu.share_gpu(options.share_gpu)
    sampling = fields_from(Sampling, {**vars(options), "max_new_tokens": max_new_tokens})
    loading = fields_from(LoadOptions, vars(options))
    if speaks_first():
        ranks = options.tp or launched()
        check_chat(source)
        found = check_request(source, sampling, loading, tp=ranks, device=options.device)
        where = f"{ranks} ranks" if ranks > 1 else "one process"
        print(f"loading {source} ({found.family.model_type}, {found.wiring.spec}) on {where}", file=sys.stderr, flush=True)
    on_ranks(options.tp, preload="ladder_residual.generation.session")
    from ..distributed.world import distributed
    from ..generation.session import Session

    with distributed(options.device, options.timeout) as world:
        Session(source, world, sampling, loading).chat(_read_line, system=system, context=context)


def _read_line() -> str:
    if sys.stdin.isatty():
        print("you> ", end="", flush=True, file=sys.stderr)
    return sys.stdin.readline().strip()
