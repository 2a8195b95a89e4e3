"""Ranks, tiles and executors of models small enough for the interpreter."""

from __future__ import annotations

from functools import cache

import torch

from ladder_residual.core.config import Wiring
from ladder_residual.engine.cache import KVCache
from ladder_residual.engine.cuda.streams import RecordingStreams
from ladder_residual.engine.executor import Executor
from ladder_residual.engine.ops.prefill import PrefillOps
from ladder_residual.engine.ops.tiles import GemvTiles, Tile
from ladder_residual.engine.quantized import rounded
from ladder_residual.engine.reducers import NoReducer
from ladder_residual.engine.schedule import plan_steps
from ladder_residual.engine.spec import EngineSpec, RankSizes
from ladder_residual.engine.weights import RankWeights, random_weights, stack_weights
from ladder_residual.models.presets import ModelShape
from tests.engine.reference import ReferenceDecoder

CPU = torch.device("cpu")
TOLERANCE = 2e-5  # relative error of float32 logits


def tiny_shape(family: str = "llama", **sizes: int) -> ModelShape:
    usual = {
        "hidden_size": 48, "intermediate_size": 40, "num_layers": 2, "num_heads": 2, "num_kv_heads": 1, "head_dim": 64,
        "vocab_size": 24,
    }  # fmt: skip
    return ModelShape(family=family, **{**usual, **sizes})  # type: ignore[arg-type]


def tiny_tiles(split_k: int, kv_splits: int, num_stages: int = 1, block_k: int = 32) -> GemvTiles:
    """Several programs of several blocks for each kernel of a tiny shape."""
    tile, few_rows = Tile(16, block_k, 1, num_stages), Tile(64, block_k, 1, num_stages)
    output = Tile(16, 64, 1, num_stages)
    return GemvTiles(few_rows, output, tile, tile, tile, split_k=split_k, kv_splits=kv_splits, block_kv=16)


@cache
def tiny_rank(shape: ModelShape, tp: int = 1, rank: int = 0) -> tuple[EngineSpec, RankSizes, RankWeights]:
    spec, sizes = EngineSpec.from_shape(shape), RankSizes.of(shape, tp, rank)
    return spec, sizes, stack_weights(spec, sizes, random_weights(spec, tp, rank, torch.float32, CPU))


def make_executor(wiring: Wiring, schedule: str, ops, sizes: RankSizes, rows: int, reducer=None, streams=None) -> Executor:
    return Executor(
        plan_steps(wiring, schedule), ops, reducer or NoReducer(), streams or RecordingStreams(), rows=rows, hidden=sizes.hidden,
        tp=sizes.tp, dtype=torch.float32, device=CPU,
    )  # fmt: skip


def random_tokens(shape: ModelShape, *size: int, seed: int = 3) -> torch.Tensor:
    return torch.randint(0, shape.vocab_size, size, generator=torch.Generator().manual_seed(seed))


def decode_error(
    shape, wiring, make_ops, *, batch=1, prompt=3, schedule="serial", tp=1, rank=0, quantise=None, kv="auto"
) -> float:
    """Prefill with the plain ops, then two decode steps with the ops under test: the largest relative error of the logits. ``quantise``:
    arguments of ``rounded``; ``kv``: the cache's type."""
    spec, sizes, weights = tiny_rank(shape, tp, rank)
    weights = weights.with_projections(lambda weight: rounded(weight, *quantise)) if quantise else weights
    wired = Wiring.parse(wiring, shape.num_layers)
    cache = KVCache(spec, sizes, batch, 64, torch.float32, CPU, kv)
    # tokens of other ranks have no part in this one
    tokens = sizes.vocab_first + random_tokens(shape, batch, prompt + 2) % sizes.vocab_tokens
    reference = ReferenceDecoder(spec, wired, [weights], tp=tp, first_rank=rank, fp8_cache=kv == "fp8")
    if prompt:
        plain = PrefillOps(spec, sizes, weights, cache, prompt)
        logits = torch.empty(batch * prompt, sizes.vocab_rows)
        make_executor(wired, "serial", plain, sizes, batch * prompt).run(tokens[:, :prompt], logits)
        reference.forward(tokens[:, :prompt])
    executor = make_executor(wired, schedule, make_ops(spec, sizes, weights, cache), sizes, batch)
    worst = 0.0
    for position in (prompt, prompt + 1):
        cache.positions.fill_(position)
        logits = torch.full((batch, sizes.vocab_rows), float("nan"))
        executor.run(tokens[:, position].contiguous(), logits)
        expected = reference.forward(tokens[:, position : position + 1])[:, 0]
        assert torch.isfinite(logits).all()
        assert expected.any()  # of zeros, no error would be found
        worst = max(worst, float((logits - expected).norm() / expected.norm()))
    return worst


LAYERS = 6
SHAPE = tiny_shape("qwen3", num_layers=LAYERS, num_heads=4, num_kv_heads=2, vocab_size=25)  # enough layers for every mixture
