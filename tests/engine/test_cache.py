"""The fp8 KV cache: its numbers, and decode steps on the interpreter against a float32 twin that rounds keys and values alike."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from ladder_residual.core.config import Wiring
from ladder_residual.engine import checks
from ladder_residual.engine.cache import KVCache, to_fp8
from ladder_residual.engine.cuda.pdl import PdlMode
from ladder_residual.engine.ops import tiles
from ladder_residual.engine.ops.gemm import GemmOps
from ladder_residual.engine.ops.gemv import GemvOps
from ladder_residual.engine.ops.prefill import FusedPrefillOps, PrefillOps
from ladder_residual.engine.ops.small_batch import SmallBatchOps
from ladder_residual.engine.ops.tiles import SmallBatchTiles
from tests.engine.tiny import CPU, decode_error, make_executor, random_tokens, tiny_rank, tiny_shape, tiny_tiles

interpreted = pytest.mark.usefixtures("interpreter")
TWO_RANKS = dict(tp=2, rank=1)
# of float32 logits, a fifth of what rounding itself changes: a number halfway between two of E4M3 may go either way
TOLERANCE = 1e-3


def dequantised(x: torch.Tensor) -> torch.Tensor:
    numbers, scales = to_fp8(x)
    return numbers.float() * scales.float().unsqueeze(-1)


def test_small_values_and_large_keys_keep_three_bits() -> None:
    """Without a scale the first would be 0 and the last NaN, or 448."""
    x = torch.randn(64, 128, generator=torch.Generator().manual_seed(2))
    for size in (1e-6, 1.0, 1e4):
        found = dequantised(size * x)
        assert ((found - size * x).abs() <= (size * x).abs() / 16 + size * 2**-14).all()
    x[:, 3] *= 1000  # a channel of outliers takes its neighbours nothing until they are 2^14 times smaller
    found, others = dequantised(x), torch.arange(128) != 3
    assert (found - x)[:, others].norm() < 0.03 * x[:, others].norm()


def test_scales_are_powers_of_two_and_numbers_stay_far_from_the_largest() -> None:
    numbers, scales = to_fp8(torch.tensor([[256.0, 1.0], [255.9, 0.0], [0.0, 0.0], [-3e38, 1.0]]))
    assert scales.tolist() == [2.0, 1.0, 2.0**-107, 2.0**120]
    assert numbers.float().abs().amax() <= 256
    assert dequantised(torch.tensor([[float("nan"), 1.0]])).isnan().any()


def test_attention_over_outlier_channels() -> None:
    """Four channels of keys 400 times larger than the others: what a model with biased keys has."""
    generator = torch.Generator().manual_seed(0)
    k, v, q = (torch.randn(4, size, 128, generator=generator) for size in (512, 512, 32))
    k[..., :4] *= 400
    q[..., :4] /= 400

    def attended(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v)

    expected = attended(k, v)
    assert (attended(dequantised(k), dequantised(v)) - expected).norm() < 0.05 * expected.norm()


@interpreted
@pytest.mark.parametrize(
    ("family", "wiring", "schedule", "batch"),
    [
        ("llama", "ladder", "interleaved", 1), ("qwen2", "standard", "serial", 1), ("qwen3", "parallel", "serial", 3),
        ("qwen2", "ladder", "two_stream", 3), ("llama", "desync-2x", "serial", 17),
    ],
)  # fmt: skip
def test_decode_steps(family: str, wiring: str, schedule: str, batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "MIN_PROGRAMS", 1)
    shape = tiny_shape(family, num_heads=4, num_kv_heads=2)
    made = {
        1: partial(GemvOps, tiles=tiny_tiles(1, 2), pdl=PdlMode.OFF),
        3: partial(SmallBatchOps, tiles=SmallBatchTiles(16, 1), pdl=PdlMode.OFF, kv_splits=2),
        17: partial(GemmOps, pdl=PdlMode.OFF, kv_splits=2),
    }[batch]
    asked = dict(batch=batch, prompt=19, schedule=schedule, kv="fp8")
    assert decode_error(shape, wiring, made, **asked, **TWO_RANKS) < TOLERANCE


@interpreted
def test_a_prompt_leaves_and_reads_what_decode_steps_will_read() -> None:
    shape = tiny_shape("qwen3", num_heads=6, num_kv_heads=2, hidden_size=72)
    spec, sizes, weights = tiny_rank(shape, 2, 1)
    batch, length = 3, 5
    found = []
    for ops in (PrefillOps, FusedPrefillOps):
        cache = KVCache(spec, sizes, batch, 16, torch.float32, CPU, "fp8")
        logits = torch.full((batch * length, sizes.vocab_rows), float("nan"))
        made = ops(spec, sizes, weights, cache, length)
        make_executor(Wiring.parse("ladder", 2), "serial", made, sizes, batch * length).run(
            random_tokens(shape, batch, length), logits
        )
        assert cache.keys.dtype == cache.values.dtype == torch.float8_e4m3fn
        assert cache.keys[..., length:, :].float().isnan().all()
        held = [
            numbers.float() * scales.unsqueeze(-1)
            for numbers, scales in zip((cache.keys, cache.values), cache.scales, strict=True)
        ]
        found.append((logits, *(numbers[..., :length, :] for numbers in held)))
    for plain, fused in zip(*found, strict=True):
        assert torch.isfinite(plain).all()
        assert (fused - plain).norm() < TOLERANCE * plain.norm()


def test_the_cache_takes_half_the_bytes() -> None:
    spec, sizes, _ = tiny_rank(tiny_shape(head_dim=128))
    held = KVCache(spec, sizes, 2, 32, torch.bfloat16, CPU, "fp8")
    held.fill(4)
    assert sum(part.nbytes for part in (held.keys, held.values, *held.scales)) == sizes.cache_bytes(2, 2, 32, "fp8")
    assert sizes.cache_bytes(2, 2, 32, "fp8") / sizes.cache_bytes(2, 2, 32) == pytest.approx(0.5 * (1 + 1 / 64))


def test_other_types_and_older_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="unknown kv-cache-dtype 'fp4'.*; choose from auto, fp8"):
        checks.check_kv_cache("fp4", CPU)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    checks.check_kv_cache("auto", torch.device("cuda"))
    with pytest.raises(ValueError, match=r"needs compute capability 8\.9 \(Ada, Hopper\), this GPU has 8\.6: use auto"):
        checks.check_kv_cache("fp8", torch.device("cuda"))
