"""The CUDA engine: one rank of a Llama-shaped decoder, a whole decode step in one CUDA graph.

One decode step, ``DecodeEngine.decode(tokens)``:

1. ``engine.py`` copies the tokens into a static buffer and replays a graph that was captured at start-up. There it captured every
   candidate (a schedule and a set of tiles), timed each, and kept the fastest, the same on all ranks.
2. ``schedule.py`` says what a step is: a ``Plan`` with a ``Step`` for each attention and MLP. A step names the outputs that are added to
   the residual stream before its module reads it (from ``core/dependencies.py``), whether its output is all-reduced, and its chain. The
   schedules are ``serial``, ``two_stream`` and ``interleaved``.
3. ``executor.py`` runs the plan under capture. For each step it waits for the outputs to add (CUDA events), calls the ops on the chain's
   CUDA stream, and starts the all-reduce, beside the chain where the plan lets the next module run without it.
4. ``ops/`` are the modules by batch: ``gemv`` (one token), ``small_batch`` (2 to 16, Triton), ``gemm`` (any, cuBLAS) and ``prefill``. They
   own the activations and launch kernels with the tile sizes of ``ops/tiles.py``.
5. ``kernels/`` are the Triton kernels. They fuse residual add, norm and projection, and with programmatic dependent launch
   (``cuda/pdl.py``) load their weights while the previous kernel still runs.
6. ``reducers.py`` all-reduces a partial: by NCCL, by symmetric memory, or, for an emulated rank, by a copy that takes as long as a link
   says. ``reducer_choice.py`` times the first two and takes the faster.

``spec.py`` and ``weights.py`` describe the model and a rank's share of it, ``quantized.py`` a quantised weight, ``cache.py`` is the
static KV cache, and ``cuda/`` has what torch and Triton do not offer: launch attributes, edges of captured graphs, the SM limit of
cuBLAS. Importing this package needs neither CUDA nor Triton.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_WHERE = {
    "DecodeEngine": "engine",
    "EngineSpec": "spec",
    "RankSizes": "spec",
    "plan_steps": "schedule",
    "random_weights": "weights",
    "stack_weights": "weights",
}
__all__ = sorted(_WHERE)
# Of a rank with random weights: the format of the layers' projections and the columns of a group. fp8 has a scale per row, or one per
# 128 columns, which is how the kernels read blocks of 128 x 128.
RANDOM_WEIGHTS: dict[str, tuple[str, int | None] | None] = {
    "bf16": None, "fp8": ("fp8", None), "fp8-block": ("fp8", 128), "int4": ("int4", 128),
}  # fmt: skip
KV_CACHE_DTYPES = ("auto", "fp8")  # auto: the model's own
NO_KV_CACHE_DTYPE = "--kv-cache-dtype {} is the CUDA engine's, which needs a GPU: leave it out"
REAL_REDUCERS = ("auto", "nccl", "symm")  # which reduce over ranks; an emulated rank has a link instead


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_WHERE[name]}"), name)
