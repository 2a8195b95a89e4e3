"""A decode step of several sequences with cuBLAS (here torch) and the kernels between, on the interpreter, against the reference."""

from __future__ import annotations

from functools import partial

import pytest

from ladder_residual.engine.cuda.pdl import PdlMode
from ladder_residual.engine.ops.gemm import GemmOps
from tests.engine.tiny import TOLERANCE, decode_error, tiny_shape

pytestmark = pytest.mark.usefixtures("interpreter")


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_families(family: str) -> None:
    ops = partial(GemmOps, pdl=PdlMode.OFF, kv_splits=2)
    assert decode_error(tiny_shape(family), "ladder", ops, batch=2, prompt=18) < TOLERANCE


@pytest.mark.parametrize(
    ("wiring", "schedule", "kv_splits"),
    [
        ("parallel", "serial", 1), ("desync-3x", "serial", 1), ("ladder:1", "two_stream", 2), ("parallel", "interleaved", 2),
        ("ladder", "interleaved", 2),
    ],
)  # fmt: skip
def test_wirings_and_schedules(wiring: str, schedule: str, kv_splits: int) -> None:
    ops = partial(GemmOps, pdl=PdlMode.OFF, kv_splits=kv_splits)
    shape = tiny_shape(num_heads=4, num_kv_heads=2)
    assert decode_error(shape, wiring, ops, batch=2, prompt=4, schedule=schedule, tp=2, rank=1) < TOLERANCE
