"""``ladder chat``."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from ..common.fields import fields_from
from ..distributed import shared_gpu
from ..distributed.launch import launched, on_ranks, speaks_first
from .options import (
    AllowNonfinite,
    Device,
    Dtype,
    Engine,
    EngineReducer,
    KVCacheDtype,
    MaxTokens,
    MinP,
    Ranks,
    RepetitionPenalty,
    Schedule,
    Seed,
    ShareGpu,
    Source,
    Stop,
    Temperature,
    Timeout,
    TopK,
    TopP,
    Uneven,
    Wiring,
    at_least_one,
)


def chat(
    source: Source,
    tp: Ranks = None,
    share_gpu: ShareGpu = False,
    wiring: Wiring = None,
    system: Annotated[str | None, typer.Option(help="System message, before the first question.")] = None,
    max_new_tokens: MaxTokens = 512,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    repetition_penalty: RepetitionPenalty = None,
    stop: Stop = None,
    seed: Seed = None,
    engine: Engine = "auto",
    schedule: Schedule = "auto",
    reducer: EngineReducer = "auto",
    kv_cache_dtype: KVCacheDtype = "auto",
    context: Annotated[int, typer.Option(help="Tokens the CUDA engine's cache holds.")] = 8192,
    device: Device = "auto",
    dtype: Dtype = "auto",
    uneven: Uneven = False,
    allow_nonfinite: AllowNonfinite = False,
    timeout: Timeout = 120.0,
) -> None:
    """Talk with a model that has a chat template. An empty line or end of input ends it."""
    from ..generation.request import LoadOptions, check_chat, check_request
    from ..generation.sampling import Sampling

    at_least_one(tp=tp, context=context)
    shared_gpu.share_gpu(share_gpu)
    sampling = fields_from(Sampling, locals())
    options = fields_from(LoadOptions, locals())
    if speaks_first():
        ranks = tp or launched()
        check_chat(source)
        found = check_request(source, sampling, options, tp=ranks, device=device)
        where = f"{ranks} ranks" if ranks > 1 else "one process"
        print(f"loading {source} ({found.family.model_type}, {found.wiring.spec}) on {where}", file=sys.stderr, flush=True)
    on_ranks(tp, preload="ladder_residual.generation.session")
    from ..distributed.world import distributed
    from ..generation.session import Session

    with distributed(device, timeout) as world:
        Session(source, world, sampling, options).chat(_read_line, system=system, context=context)


def _read_line() -> str:
    if sys.stdin.isatty():
        print("you> ", end="", flush=True, file=sys.stderr)
    return sys.stdin.readline().strip()
