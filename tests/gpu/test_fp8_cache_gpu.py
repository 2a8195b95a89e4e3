"""The fp8 KV cache in the engine on a real GPU: logits against a float32 twin that rounds keys and values alike, and against a
cache in 16 bits.

``PYTHONPATH=src:. python tests/gpu/test_fp8_cache_gpu.py`` runs it from a clone without pytest.
"""

from __future__ import annotations

import itertools

import torch

from ladder_residual.core.config import Wiring
from ladder_residual.engine import DecodeEngine, EngineSpec, RankSizes, random_weights, stack_weights
from ladder_residual.engine.cache import KVCache
from ladder_residual.engine.schedule import SCHEDULES
from ladder_residual.links import parse_link
from ladder_residual.models.presets import ModelShape
from tests.engine.reference import ReferenceDecoder

try:
    import pytest

    pytestmark = [
        pytest.mark.gpu,
        pytest.mark.skipif(
            not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9),
            reason="needs a CUDA device that converts E4M3",
        ),
    ]
except ImportError:  # a bare machine: main() below calls the tests
    pass

SIZES = dict(
    hidden_size=2048, intermediate_size=2816, num_layers=4, num_heads=16, num_kv_heads=4, head_dim=128, vocab_size=4096
)
STEPS = 3
TOLERANCE = 2e-2  # relative error of logits: bfloat16 against float32. Of the float32 twins, fp8 alone makes 0.4e-2


def logits(engine: DecodeEngine, tokens: torch.Tensor) -> list[torch.Tensor]:
    """Of a prompt, and of STEPS tokens after it."""
    length = tokens.shape[1] - STEPS
    found = [engine.prefill(tokens[:, :length]).float()]
    for index in range(length, length + STEPS):
        engine._logits.fill_(float("nan"))  # every logit must be written anew
        found.append(engine.decode(tokens[:, index]).float())
    assert all(torch.isfinite(part).all() for part in found)
    return found


def worst_errors(
    family: str = "llama", wiring: str = "ladder", batch: int = 1, *, length: int = 96, schedule: str = "auto",
    dtype: torch.dtype = torch.bfloat16,
) -> tuple[float, float]:  # fmt: skip
    """Of the logits with an fp8 cache: against the float32 twin, against the same engine with a cache in ``dtype``."""
    shape = ModelShape(family=family, **SIZES)
    spec, sizes, wired = EngineSpec.from_shape(shape), RankSizes.of(shape, 2, 1), Wiring.parse(wiring, shape.num_layers)
    weights = stack_weights(spec, sizes, random_weights(spec, 2, 1, dtype, "cuda"))
    generator = torch.Generator().manual_seed(1)
    tokens = sizes.vocab_first + torch.randint(0, sizes.vocab_tokens, (batch, length + STEPS), generator=generator).cuda()

    def engine(kv_cache_dtype: str) -> DecodeEngine:
        asked = dict(tp=2, rank=1, reducer="emulated", link=parse_link("5us"), batch=batch, max_context=length + 32)
        return DecodeEngine(spec, wired, weights, **asked, schedule=schedule, kv_cache_dtype=kv_cache_dtype)

    found = [part.clone() for part in logits(engine("fp8"), tokens)]
    plain = logits(engine("auto"), tokens)
    reference = ReferenceDecoder(spec, wired, [weights], tp=2, first_rank=1, fp8_cache=True)
    twin = [reference.forward(tokens[:, :length])[:, -1]]
    twin += [reference.forward(tokens[:, index : index + 1])[:, 0] for index in range(length, length + STEPS)]

    def worst(expected: list[torch.Tensor]) -> float:
        return max(float((a - b).norm() / b.norm()) for a, b in zip(found, expected, strict=True))

    return worst(twin), worst(plain)


def check(*case, **asked) -> None:
    over_twin, over_bf16 = worst_errors(*case, **asked)
    print(*case, *asked.values(), f": {over_twin:.4f} over the twin, {over_bf16:.4f} over a cache in 16 bits", flush=True)
    assert max(over_twin, over_bf16) <= TOLERANCE, (case, asked, over_twin, over_bf16)


def test_families_wirings_and_batches() -> None:
    for family, wiring, batch in itertools.product(
        ("llama", "qwen2", "qwen3"), ("standard", "ladder", "parallel"), (1, 3, 16, 33)
    ):
        check(family, wiring, batch)


def test_schedules_and_float16() -> None:
    for schedule, batch in itertools.product(SCHEDULES, (1, 3)):
        check("llama", "ladder", batch, schedule=schedule)
    check("llama", "ladder", 3, dtype=torch.float16)


def test_a_long_context() -> None:
    check("llama", "ladder", 1, length=8000)


def test_prompts_and_steps_write_alike() -> None:
    """What a prompt leaves in the cache and what decode steps append; the same tokens, so the same but for near ties."""
    shape = ModelShape(family="llama", **SIZES)
    spec = EngineSpec.from_shape(shape)
    weights = stack_weights(spec, RankSizes.of(shape, 1, 0), random_weights(spec, 1, 0, torch.bfloat16, "cuda"))
    tokens, caches = torch.randint(0, 4096, (1, 64), device="cuda"), []
    for prompt in (64, 32):
        engine = DecodeEngine(spec, Wiring.parse("standard", 4), weights, max_context=80, kv_cache_dtype="fp8")
        engine.prefill(tokens[:, :prompt])
        for index in range(prompt, 64):
            engine.decode(tokens[:, index])
        caches.append(engine.cache)
    for index in range(2):
        read, appended = (held(cache, index)[0, :, :, 32:64] for cache in caches)
        assert (read - appended).norm() < 8e-2 * read.norm()
    for cache in caches:
        for numbers, scales in zip((cache.keys, cache.values), cache.scales, strict=True):
            largest = numbers[..., :64, :].float().abs().amax(-1)
            assert ((largest >= 128) & (largest <= 256)).all()
            assert (torch.frexp(scales[..., :64].float()).mantissa == 0.5).all()  # powers of two
            assert numbers[..., 64:, :].float().isnan().all()


def held(cache: KVCache, index: int) -> torch.Tensor:
    return (cache.keys, cache.values)[index].float() * cache.scales[index].float().unsqueeze(-1)


if __name__ == "__main__":
    for test in (
        test_prompts_and_steps_write_alike, test_schedules_and_float16, test_a_long_context, test_families_wirings_and_batches,
    ):  # fmt: skip
        test()
        print(test.__name__, "passed", flush=True)
