"""Quantised weights in the engine on a real GPU, against the dequantised model in float32.

``PYTHONPATH=src:. python tests/gpu/test_quantized_gpu.py`` runs it from a clone without pytest.
"""

from __future__ import annotations

import itertools

import torch

from ladder_residual.core.config import Wiring
from ladder_residual.engine import DecodeEngine, EngineSpec, RankSizes, random_weights, stack_weights
from ladder_residual.engine.quantized import dense, rounded
from ladder_residual.engine.schedule import SCHEDULES
from ladder_residual.links import parse_link
from ladder_residual.models.presets import ModelShape
from tests.engine.reference import ReferenceDecoder

try:
    import pytest

    pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
except ImportError:  # a bare machine: main() below calls the tests
    pass

SHAPE = ModelShape(
    family="llama", hidden_size=2048, intermediate_size=2816, num_layers=4, num_heads=16, num_kv_heads=2, head_dim=128,
    vocab_size=4096,
)  # fmt: skip
# format, columns of a group, zero points
FORMATS = [
    ("fp8", None, False), ("fp8", 128, False), ("int4", None, True), ("int4", 32, True), ("int4", 64, False), ("int4", 128, False),
    ("int4", 128, True),
]  # fmt: skip
WIRINGS = ["standard", "ladder", "ladder:2-3", "parallel", "desync-2x"]
TOLERANCE = 2e-2  # relative error of bfloat16 logits against float32


def worst_error(quantise, wiring: str, batch: int, *, schedule: str = "auto", link: str = "5us", steps: int = 3) -> float:
    spec, sizes = EngineSpec.from_shape(SHAPE), RankSizes.of(SHAPE, 2, 1)
    plain = stack_weights(spec, sizes, random_weights(spec, 2, 1, torch.bfloat16, "cuda"))
    weights = plain.with_projections(lambda weight: rounded(weight, *quantise))
    wired, length = Wiring.parse(wiring, SHAPE.num_layers), 96
    engine = DecodeEngine(
        spec,
        wired,
        weights,
        tp=2,
        rank=1,
        reducer="emulated",
        link=parse_link(link),
        batch=batch,
        max_context=128,
        schedule=schedule,
    )
    reference = ReferenceDecoder(spec, wired, [weights], tp=2, first_rank=1)
    tokens = sizes.vocab_first + torch.randint(0, sizes.vocab_tokens, (batch, length + steps), device="cuda")
    errors = [(engine.prefill(tokens[:, :length]).float(), reference.forward(tokens[:, :length])[:, -1])]
    for index in range(length, length + steps):
        engine._logits.fill_(float("nan"))  # every logit must be written anew
        found = engine.decode(tokens[:, index]).float()
        assert torch.isfinite(found).all()
        errors.append((found.clone(), reference.forward(tokens[:, index : index + 1])[:, 0]))
    return max(float((found - expected).norm() / expected.norm()) for found, expected in errors)


def test_formats_wirings_and_batches() -> None:
    for quantise, wiring, batch in itertools.product(FORMATS, WIRINGS, (1, 3, 16)):
        error = worst_error(quantise, wiring, batch)
        print(*quantise, wiring, f"batch {batch}: {error:.4f}", flush=True)
        assert error <= TOLERANCE, (quantise, wiring, batch, error)


def test_schedules() -> None:
    for quantise, schedule, batch in itertools.product(FORMATS[:2] + FORMATS[-2:], SCHEDULES, (1, 3)):
        error = worst_error(quantise, "ladder", batch, schedule=schedule, link="20us")
        assert error <= TOLERANCE, (quantise, schedule, batch, error)


def test_a_batch_that_dequantises() -> None:
    for quantise in FORMATS:
        error = worst_error(quantise, "ladder", 33)
        assert error <= TOLERANCE, (quantise, error)


def test_dense_equals_plain_torch() -> None:
    for quantise in FORMATS:
        weight = rounded(torch.randn(96, 14336, device="cuda"), *quantise)
        assert torch.equal(dense(weight, torch.float32), weight.float()), quantise


if __name__ == "__main__":
    for test in (
        test_dense_equals_plain_torch, test_formats_wirings_and_batches, test_schedules, test_a_batch_that_dequantises,
    ):  # fmt: skip
        test()
        print(test.__name__, "passed", flush=True)
