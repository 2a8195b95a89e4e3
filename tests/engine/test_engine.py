"""``DecodeEngine`` without a GPU: a "graph" that runs its step again, kernels on the interpreter. tests/gpu has the real thing."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from ladder_residual.core.config import Wiring
from ladder_residual.engine import DecodeEngine, EngineSpec, engine
from ladder_residual.engine.cuda.streams import RecordingStreams
from tests.engine.reference import ReferenceDecoder
from tests.engine.tiny import TOLERANCE, random_tokens, tiny_rank, tiny_shape, tiny_tiles
from tests.ranks import run_on_ranks

SHAPE = tiny_shape()
REFUSING = (None, 0, 1)


class Graph:
    def __init__(self, keep_graph):
        self.replay = sys._getframe(1).f_locals["step"]

    def instantiate(self):
        pass


@pytest.fixture
def simulated_gpu(monkeypatch, interpreter):
    stream = SimpleNamespace(wait_stream=lambda other: None)
    context, nothing = lambda *args, **options: nullcontext(), lambda *args, **options: None
    for name in ("device", "stream", "graph"):
        monkeypatch.setattr(torch.cuda, name, context)
    for name in ("Stream", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, lambda *args, **options: stream)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "synchronize", nothing)
    for name in ("check_weights", "require_memory", "require"):
        monkeypatch.setattr(engine, name, nothing)
    monkeypatch.setattr(engine, "CudaStreams", lambda device, priorities: RecordingStreams())


def time_by_schedule(monkeypatch, times):
    """Timed steps of the schedules, in the order they are tried, take these times."""
    left = iter(times)
    monkeypatch.setattr(DecodeEngine, "_time_steps", lambda self, graph, context: [next(left)])


@pytest.mark.parametrize(
    ("batch", "wiring", "tiles", "backend", "times", "chosen"),
    [
        (1, "ladder", tiny_tiles(1, 2), "auto", (3, 2, 1), "interleaved"),
        (2, "ladder", None, "cublas", (3, 1, 2), "two_stream"),
        (2, "parallel", None, "cublas", (1, 2), "serial"),
        (1, "desync-3x", tiny_tiles(2, 1), "auto", (), "serial"),
    ],
)
def test_prompts_and_steps_by_the_fastest_schedule(
    simulated_gpu, monkeypatch, batch, wiring, tiles, backend, times, chosen
):  # fmt: skip
    time_by_schedule(monkeypatch, times)
    spec, _, weights = tiny_rank(SHAPE)
    wired = Wiring.parse(wiring, SHAPE.num_layers)
    decoder = DecodeEngine(spec, wired, weights, batch=batch, max_context=8, tiles=tiles, gemm_backend=backend)
    assert decoder.schedule == chosen
    assert sorted(decoder.step_ms.values()) == sorted(times)
    assert decoder.gemm_backend == ("triton" if tiles else "cublas")
    tokens = random_tokens(SHAPE, batch, 7)
    reference = ReferenceDecoder(spec, wired, [weights], tp=1)
    for found, new in ((decoder.prefill, tokens[:, :5]), (decoder.decode, tokens[:, 5]), (decoder.decode, tokens[:, 6])):
        logits, expected = found(new), reference.forward(new.view(batch, -1))[:, -1]
        assert (logits - expected).norm() / expected.norm() < TOLERANCE
        assert torch.equal(decoder.argmax(logits), expected.argmax(-1))


def test_prompts_and_steps_with_an_fp8_cache(simulated_gpu):
    spec, _, weights = tiny_rank(SHAPE)
    wired, asked = (
        Wiring.parse("ladder", SHAPE.num_layers),
        dict(batch=2, max_context=8, schedule="serial", gemm_backend="cublas"),
    )
    decoder = DecodeEngine(spec, wired, weights, **asked, kv_cache_dtype="fp8")
    tokens = random_tokens(SHAPE, 2, 7)
    reference = ReferenceDecoder(spec, wired, [weights], tp=1, fp8_cache=True)
    for _ in range(2):  # a second prompt takes the place of the first
        reference.caches, reference.length = [[None] * SHAPE.num_layers], 0
        for found, new in ((decoder.prefill, tokens[:, :5]), (decoder.decode, tokens[:, 5]), (decoder.decode, tokens[:, 6])):
            logits, expected = found(new), reference.forward(new.view(2, -1))[:, -1]
            assert (logits - expected).norm() / expected.norm() < 1e-3
        decoder.reset(4, random_context=True)
        assert decoder.decode(tokens[:, 5]).isfinite().all()
    with pytest.raises(ValueError, match="context 8 and kv_cache_dtype fp8, not 2, 8 and auto"):
        DecodeEngine(spec, wired, weights, **asked, cache=decoder.cache)


def agreements(world):
    decoder = object.__new__(DecodeEngine)  # of an engine only its group
    decoder.sizes, decoder.device, decoder._groups = SimpleNamespace(tp=2), world.device, (world.group, world.group)
    return [decoder._all_ranks(world.rank != refusing) for refusing in REFUSING]


def test_ranks_read_before_they_wait_all_or_none():
    assert run_on_ranks(2, agreements) == [[refusing is None for refusing in REFUSING]] * 2


def test_modes_that_not_all_kernels_have_are_refused():
    message = r"pdl=3 is not a mode of all kernels; choose from OFF \(0\), TRIGGER_THEN_WAIT \(1\), WAIT_THEN_TRIGGER \(2\)"
    with pytest.raises(ValueError, match=message):
        DecodeEngine(EngineSpec.from_shape(SHAPE), Wiring.parse("ladder", 2), {}, pdl=3)
