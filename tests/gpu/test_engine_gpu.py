"""The engine on a real GPU against the reference in float32.

``PYTHONPATH=src:. python tests/gpu/test_engine_gpu.py`` runs it from a clone without pytest; with the argument ``small`` only what is quick
under compute-sanitizer, with ``0 3`` every third test from the first on. ``make test-gpu`` runs all files of this folder.
"""

from __future__ import annotations

import itertools
import os
import sys
import tempfile
import time
import traceback
from dataclasses import replace
from unittest.mock import patch

import torch

from ladder_residual.common.environment import environment
from ladder_residual.core.config import Wiring
from ladder_residual.engine import DecodeEngine, EngineSpec, RankSizes, random_weights, stack_weights
from ladder_residual.engine.ops import tiles
from ladder_residual.engine.ops.tiles import GemvTiles, SmallBatchTiles
from ladder_residual.engine.schedule import SCHEDULES
from ladder_residual.links import parse_link
from ladder_residual.models.presets import ModelShape
from tests.engine.reference import ReferenceDecoder

try:
    import pytest

    pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
    parametrize = pytest.mark.parametrize
except ImportError:  # a bare machine: main() below reads the same tables

    def parametrize(names, values):  # type: ignore[no-redef]
        def keep(function):
            function.tables = [*getattr(function, "tables", []), (names, values)]
            return function

        return keep


SHAPE = ModelShape(
    family="llama",
    hidden_size=1024,
    intermediate_size=2816,
    num_layers=4,
    num_heads=16,
    num_kv_heads=2,
    head_dim=128,
    vocab_size=4096,
)
WIRINGS = ["standard", "ladder", "ladder:2-3", "ladder:1,3", "parallel", "desync-2x", "desync-3x", "no-comm"]
CANDIDATES = 9  # sets of tiles for one token, at most (tests/engine/ops/test_tiles.py)
TOLERANCE = 2e-2  # relative error of bfloat16 logits against float32


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.float() - expected).norm() / expected.norm())


def worst_error(
    shape, wiring, *, batch=1, context=96, schedule="auto", link="none", tp=2, rank=0, dtype=torch.bfloat16, steps=4,
    gemm_backend="cublas", **details,
) -> float:  # fmt: skip
    """Of a prompt's logits and of some steps after it; ``context`` may be several, all read by one engine."""
    contexts = [context] if isinstance(context, int) else context
    spec, sizes = EngineSpec.from_shape(shape, **details), RankSizes.of(shape, tp, rank)
    wired = Wiring.parse(wiring, shape.num_layers)
    weights = stack_weights(spec, sizes, random_weights(spec, tp, rank, dtype, "cuda"))
    engine = DecodeEngine(
        spec, wired, weights, tp=tp, rank=rank, reducer="emulated" if tp > 1 else "none", link=parse_link(link), batch=batch,
        max_context=max(contexts) + steps + 1, schedule=schedule, gemm_backend=gemm_backend,
    )  # fmt: skip
    errors = []
    for length in contexts:
        reference = ReferenceDecoder(spec, wired, [weights], tp=tp, first_rank=rank)
        tokens = sizes.vocab_first + torch.randint(0, sizes.vocab_tokens, (batch, length + steps), device="cuda")
        errors.append(relative(engine.prefill(tokens[:, :length]), reference.forward(tokens[:, :length])[:, -1]))
        for index in range(length, length + steps):
            engine._logits.fill_(float("nan"))  # every logit must be written anew
            found = engine.decode(tokens[:, index])
            assert torch.isfinite(found).all()
            errors.append(relative(found, reference.forward(tokens[:, index : index + 1])[:, 0]))
    return max(errors)


@parametrize("wiring", WIRINGS)
@parametrize("batch", [1, 3, 16])
@parametrize("link", ["none", "5us"])
def test_logits_of_every_wiring(wiring: str, batch: int, link: str) -> None:
    assert worst_error(SHAPE, wiring, batch=batch, link=link) <= TOLERANCE


@parametrize("schedule", SCHEDULES)
@parametrize("wiring", ["ladder", "ladder:2-3", "ladder:0,2"])
@parametrize("batch", [1, 3])
def test_every_schedule(schedule: str, wiring: str, batch: int) -> None:
    assert worst_error(SHAPE, wiring, batch=batch, schedule=schedule, link="20us") <= TOLERANCE


@parametrize("schedule", SCHEDULES)
@parametrize("batch", [1, 3])
def test_all_reduces_without_pdl(schedule: str, batch: int) -> None:
    assert worst_error(SHAPE, "ladder", batch=batch, schedule=schedule, link="20us,no-pdl") <= TOLERANCE


@parametrize("batch", [1, 3])
def test_parallel_layers_interleaved(batch: int) -> None:
    assert worst_error(SHAPE, "parallel", batch=batch, schedule="interleaved", link="20us") <= TOLERANCE


@parametrize("context", [1, 2, 63, 64, 65, 1000, 4096])
@parametrize("batch", [1, 3])
def test_contexts(context: int, batch: int) -> None:
    assert worst_error(SHAPE, "ladder", context=context, batch=batch) <= TOLERANCE


CONTEXTS = [1, 2, 63, 64, 65, 500, 1000, 2048, 4096]


@parametrize("wiring", WIRINGS)
@parametrize("batch", [1, 3, 16])
def test_every_wiring_at_every_context(wiring: str, batch: int) -> None:
    """Two KV heads on the rank and few layers, because the reference keeps all scores of sixteen prompts of 4096."""
    few = replace(SHAPE, num_heads=8, num_kv_heads=4)
    assert worst_error(few, wiring, context=CONTEXTS, batch=batch, steps=2) <= TOLERANCE


@parametrize("wiring", WIRINGS)
@parametrize("batch", [2, 3, 7, 16])
def test_triton_gemm(wiring: str, batch: int) -> None:
    assert worst_error(SHAPE, wiring, batch=batch, link="5us", gemm_backend="triton") <= TOLERANCE


@parametrize("family", ["llama", "qwen2", "qwen3"])
@parametrize("rows", [16, 32, 64])
def test_every_tile_of_the_triton_gemm(family: str, rows: int) -> None:
    """The one asked for, whatever would be fastest, and however small this model is."""
    only = patch.object(SmallBatchTiles, "candidates", lambda sizes: [SmallBatchTiles(rows, 2)])
    with only, patch.object(tiles, "MIN_PROGRAMS", 1):
        assert worst_error(replace(SHAPE, family=family), "ladder", batch=5, gemm_backend="triton") <= TOLERANCE


@parametrize("family", ["llama", "qwen3"])
@parametrize("hidden", [576, 2048])  # no power of two; QKV with split-K, and one candidate more
@parametrize("index", range(CANDIDATES))
def test_every_candidate_for_one_token(family: str, hidden: int, index: int) -> None:
    """Those that are timed at start-up, one by one; two_stream or interleaved, where each kernel runs beside others."""
    shape = replace(SHAPE, family=family, hidden_size=hidden)
    candidates = GemvTiles.candidates(RankSizes.of(shape, 2, 0), 101)
    made = candidates[index % len(candidates)]
    schedule = "interleaved" if "interleaved" in made.schedules else "two_stream"
    with patch.object(GemvTiles, "candidates", lambda *_: [made]):
        assert worst_error(shape, "ladder", schedule=schedule, link="5us") <= TOLERANCE


@parametrize("tp", [2, 8])
def test_tiles_in_shared_memory_are_filled_again(tp: int) -> None:
    """Each persistent program has more blocks than tiles; with 8 ranks it is one of Llama-3-70B."""
    candidates = GemvTiles.candidates
    sizes = {"hidden_size": 8192, "intermediate_size": 28672} if tp == 8 else {"hidden_size": 2048, "intermediate_size": 32768}
    shape = replace(SHAPE, **sizes, num_heads=64, num_kv_heads=8, num_layers=2)

    def in_shared_memory(*arguments: object) -> list[GemvTiles]:
        (made,) = (made for made in candidates(*arguments) if made.gate_up.smem_tiles)
        return [made]

    with patch.object(GemvTiles, "candidates", in_shared_memory):
        assert worst_error(shape, "ladder", schedule="serial", link="20us", tp=tp) <= TOLERANCE


@parametrize("context", [16384, 32768])
def test_long_contexts(context: int) -> None:
    """Two heads and two layers, because the reference keeps all scores of a 32k prompt."""
    few = ModelShape(**{**SHAPE.to_dict(), "num_heads": 2, "num_kv_heads": 1, "num_layers": 2})
    assert worst_error(few, "ladder", context=context, tp=1) <= TOLERANCE


@parametrize("family", ["qwen2", "qwen3", "mistral"])
@parametrize("batch", [1, 3])
def test_families(family: str, batch: int) -> None:
    assert worst_error(replace(SHAPE, family=family), "ladder", batch=batch) <= TOLERANCE


ODD_SIZES = [
    {"hidden_size": 576, "intermediate_size": 1536, "num_heads": 9, "num_kv_heads": 3, "head_dim": 64},
    {"hidden_size": 3584, "intermediate_size": 18944, "num_heads": 28, "num_kv_heads": 4},
    {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_heads": 32,
        "num_kv_heads": 8,
        "head_dim": 64,
        "tied_embeddings": True,
    },
    {"hidden_size": 2304, "intermediate_size": 9216, "num_heads": 8, "num_kv_heads": 4, "head_dim": 256},
]
SCALINGS = [
    {"rope_type": "linear", "factor": 4.0},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
]


@parametrize("wiring", ["standard", "ladder", "desync-2x"])
@parametrize("batch", [1, 3])
def test_float32(wiring: str, batch: int) -> None:
    """Nothing but the order of additions differs."""
    assert worst_error(SHAPE, wiring, batch=batch, link="5us", dtype=torch.float32) <= 1e-5


@parametrize("sizes", ODD_SIZES)
@parametrize("dtype", [torch.bfloat16, torch.float16])
def test_odd_sizes_and_dtypes(sizes: dict, dtype: torch.dtype) -> None:
    shape = ModelShape(**{**SHAPE.to_dict(), **sizes, "num_layers": 2})
    for batch in (1, 3):
        assert worst_error(shape, "ladder", tp=1, dtype=dtype, batch=batch, gemm_backend="triton") <= TOLERANCE


@parametrize("scaling", SCALINGS)
@parametrize("batch", [1, 3])
def test_rope_scalings(scaling: dict, batch: int) -> None:
    assert worst_error(SHAPE, "ladder", batch=batch, context=300, rope_scaling=scaling) <= TOLERANCE


@parametrize("rank", [0, 1])
def test_a_vocabulary_that_ranks_do_not_divide(rank: int) -> None:
    """The second rank's shard ends in a row that is no token."""
    odd = replace(SHAPE, vocab_size=4099)
    for batch, backend in ((1, "cublas"), (4, "cublas"), (4, "triton")):
        assert worst_error(odd, "ladder", batch=batch, rank=rank, gemm_backend=backend) <= TOLERANCE


def test_prompts_of_different_lengths() -> None:
    spec = EngineSpec.from_shape(SHAPE)
    weights = stack_weights(spec, RankSizes.of(SHAPE, 1, 0), random_weights(spec, 1, 0, torch.bfloat16, "cuda"))
    wiring = Wiring.parse("ladder", SHAPE.num_layers)
    engine = DecodeEngine(spec, wiring, weights, batch=3, max_context=64)
    tokens = torch.randint(0, SHAPE.vocab_size, (3, 21), device="cuda")
    lengths = torch.tensor([20, 7, 1])
    together = engine.prefill(tokens[:, :20], lengths).clone()
    then = engine.decode(tokens[:, 20]).clone()
    for row, length in enumerate(lengths.tolist()):
        reference = ReferenceDecoder(spec, wiring, [weights], tp=1)
        assert relative(together[row], reference.forward(tokens[row : row + 1, :length])[0, -1]) <= TOLERANCE
        assert relative(then[row], reference.forward(tokens[row : row + 1, 20:])[0, 0]) <= TOLERANCE


def test_greedy_tokens_equal_transformers() -> None:
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=512, intermediate_size=1408, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=2, head_dim=64,
        vocab_size=1000, initializer_range=0.08, rope_parameters={
            "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64},
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).eval().cuda().float()
    spec = EngineSpec.from_hf(config.to_dict())
    state = {name: tensor.to(torch.float16) for name, tensor in model.state_dict().items()}
    model.load_state_dict({name: tensor.float() for name, tensor in state.items()})
    engine = DecodeEngine(spec, Wiring.parse("standard", 4), state, batch=2, max_context=128)
    prompt = torch.randint(0, 1000, (2, 9), device="cuda")
    expected = model.generate(prompt, max_new_tokens=40, min_new_tokens=40, do_sample=False, pad_token_id=0)[:, 9:]
    tokens = engine.argmax(engine.prefill(prompt))
    found = [tokens]
    for index in range(39):
        tokens = engine.argmax(engine.decode(expected[:, index]))  # teacher-forced: one near-tie must not hide the rest
        found.append(tokens)
    agree = float((torch.stack(found, 1) == expected).float().mean())
    assert agree >= 0.97, f"{agree:.3f} of greedy tokens equal"


@parametrize("reducer", ["nccl", "symm"])
@parametrize("batch", [1, 160])  # messages of 2 and of 320 KiB: symmetric memory reduces them in one shot and in two
def test_real_reducers_on_one_rank(reducer: str, batch: int) -> None:
    """One process is all a single GPU can hold of NCCL; it still proves that the collectives are captured and waited for."""
    import torch.distributed as dist

    if not dist.is_initialized():
        store = tempfile.mkdtemp()
        dist.init_process_group(
            "nccl", init_method=f"file://{store}/rendezvous", rank=0, world_size=1, device_id=torch.device("cuda", 0)
        )
    groups = (dist.new_group([0]), dist.new_group([0]))
    spec = EngineSpec.from_shape(SHAPE)
    weights = stack_weights(spec, RankSizes.of(SHAPE, 1, 0), random_weights(spec, 1, 0, torch.bfloat16, "cuda"))
    wiring = Wiring.parse("ladder", SHAPE.num_layers)
    for schedule in SCHEDULES:
        engine = DecodeEngine(
            spec, wiring, weights, reducer=reducer, groups=groups, batch=batch, max_context=32, schedule=schedule
        )
        assert engine.reducer.name == reducer
        reference = ReferenceDecoder(spec, wiring, [weights], tp=1)
        tokens = torch.randint(0, SHAPE.vocab_size, (batch, 6), device="cuda")
        for index in range(6):
            found = engine.decode(tokens[:, index])
            assert relative(found, reference.forward(tokens[:, index : index + 1])[:, 0]) <= TOLERANCE
        assert engine.gather(found).shape == (batch, SHAPE.vocab_size)
        assert torch.equal(engine.argmax(found), found.argmax(-1))


def test_refusals() -> None:
    spec = EngineSpec.from_shape(SHAPE)
    weights = stack_weights(spec, RankSizes.of(SHAPE, 1, 0), random_weights(spec, 1, 0, torch.bfloat16, "cuda"))
    wiring = Wiring.parse("standard", SHAPE.num_layers)
    engine = DecodeEngine(spec, wiring, weights, batch=1, max_context=4)
    for text, call in (
        ("graph is for batch 1, got 2", lambda: engine.decode(torch.zeros(2, dtype=torch.long))),
        ("does not fit max_context=4", lambda: engine.prefill(torch.zeros(1, 5, dtype=torch.long))),
        ("needs .* GB", lambda: DecodeEngine(spec, wiring, weights, batch=256, max_context=1 << 20)),
        ("would drop the other ranks", lambda: DecodeEngine(spec, wiring, weights, tp=2, reducer="none")),
    ):
        _raises(text, call)
    for _ in range(4):
        engine.decode(torch.zeros(1, dtype=torch.long))
    _raises("cache is full", lambda: engine.decode(torch.zeros(1, dtype=torch.long)))


def _raises(text: str, call) -> None:
    import re

    try:
        call()
    except ValueError as error:
        assert re.search(text, str(error)), f"{text!r} not in {error}"
    else:
        raise AssertionError(f"no ValueError about {text!r}")


def small() -> int:
    """Each kernel and schedule once, on models of two layers: the wider one has QKV with split-K and tiles in shared memory."""
    shape = replace(SHAPE, num_layers=2, hidden_size=512, intermediate_size=768, num_heads=4, num_kv_heads=2, vocab_size=256)
    wide = replace(shape, hidden_size=2048)
    worst = worst_error(wide, "ladder", context=70, steps=2, schedule="serial", link="5us")
    for wiring, batch, schedule, backend in (
        ("ladder", 1, "two_stream", "cublas"),
        ("ladder", 1, "serial", "cublas"),
        ("ladder", 1, "interleaved", "cublas"),
        ("parallel", 1, "interleaved", "cublas"),
        ("standard", 3, "serial", "cublas"),
        ("desync-2x", 1, "serial", "cublas"),
        ("parallel", 3, "serial", "cublas"),
        ("ladder", 3, "two_stream", "cublas"),
        ("ladder", 3, "two_stream", "triton"),
        ("ladder", 3, "interleaved", "triton"),
        ("desync-3x", 5, "serial", "triton"),
    ):
        sizes = {"batch": batch, "context": 70, "steps": 2}
        worst = max(worst, worst_error(shape, wiring, **sizes, schedule=schedule, link="5us", gemm_backend=backend))
    print(f"worst relative error {worst:.4f}, commit {environment()['commit']}", flush=True)
    return int(worst > TOLERANCE)


def main(part: int = 0, parts: int = 1, tests: dict[str, object] | None = None) -> int:
    """Every ``parts``-th test from ``part`` on: several processes share the GPU."""
    if not 0 <= part < parts:
        raise SystemExit(f"part {part} is not one of 0 to {parts - 1}")
    failures = count = seen = 0
    began, spoken = time.perf_counter(), 0.0
    for name, test in list((tests or globals()).items()):
        if not name.startswith("test_"):
            continue
        tables = getattr(test, "tables", None)
        if tables is None:  # pytest is there: read its marks
            tables = [mark.args[:2] for mark in getattr(test, "pytestmark", []) if mark.name == "parametrize"]
        for values in itertools.product(*(values for _, values in tables)):
            arguments = dict(zip((names for names, _ in tables), values, strict=True))
            index, seen = seen, seen + 1
            if index % parts != part:
                continue
            count += 1
            try:
                test(**arguments)
            except Exception:
                failures += 1
                print(f"FAILED {name} {arguments}", flush=True)
                traceback.print_exc(limit=3)
            if time.perf_counter() - began > spoken + 20:  # a long silence looks like a hang
                spoken = time.perf_counter() - began
                print(f"{count} tests, {spoken:.0f} s", flush=True)
    where = {name: value for name, value in environment().items() if name in ("gpu", "torch", "triton", "date", "commit")}
    print(f"{count - failures} of {count} passed in {time.perf_counter() - began:.0f} s: {where}", flush=True)
    return int(failures > 0)


if __name__ == "__main__":
    code = small() if sys.argv[1:] == ["small"] else main(*map(int, sys.argv[1:]))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    os._exit(code)
