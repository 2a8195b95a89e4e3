"""What the engine refuses before it allocates anything."""

from __future__ import annotations

import pytest
import torch

from ladder_residual.common.memory import require
from ladder_residual.core.config import Wiring
from ladder_residual.engine.checks import check_request, check_weights, prefill_bytes
from ladder_residual.engine.spec import EngineSpec, RankSizes
from ladder_residual.models.presets import ModelShape
from tests.engine.tiny import CPU, tiny_shape

GPU = torch.device("cuda")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch": 300}, "batch 300 is outside 1 to 256"), ({"max_context": 1}, "max_context 1 is outside 2 to 1048576"),
        ({"gemm_backend": "mkl"}, "unknown gemm_backend 'mkl'; choose from auto, cublas, triton"),
        ({"schedule": "three"}, "unknown schedule 'three'"), ({"tp": 3}, "does not divide into tp=3"),
        ({"wiring": Wiring.parse("ladder", 3)}, "the wiring is for 3 layers, the model has 2"),
    ],
)  # fmt: skip
def test_requests(change: dict, message: str) -> None:
    usual = dict(batch=1, max_context=64, schedule="auto", tp=1, wiring=Wiring.parse("ladder", 2))
    spec = EngineSpec.from_shape(tiny_shape())
    check_request(spec, **usual)
    with pytest.raises(ValueError, match=message):
        check_request(spec, **usual | change)


def test_float32_runs_where_it_is_asked_for() -> None:
    """The kernels are tuned for weights of two bytes; float32 is there to compare."""
    with pytest.raises(ValueError, match="not torch.float32: use --dtype bfloat16, or --engine cuda to compare"):
        check_weights(torch.float32, GPU)
    check_weights(torch.float32, GPU, exact=True)
    with pytest.raises(ValueError, match="not torch.float64: use --dtype bfloat16$"):
        check_weights(torch.float64, GPU, exact=True)
    with pytest.raises(ValueError, match="needs weights on a GPU, they are on cpu"):
        check_weights(torch.bfloat16, CPU)


def test_a_prompt_that_does_not_fit_the_gpu_is_refused_with_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = RankSizes.of(ModelShape.from_name("llama-3-70b"), 8, 0)
    need = prefill_bytes(sizes, 4 * 32768, 2, in_place=False)
    assert prefill_bytes(sizes, 4 * 32768, 2, in_place=True) < need
    assert 30e9 < need < 120e9  # outputs 8192 wide and an MLP of 3584, for 131,072 rows
    monkeypatch.setattr("ladder_residual.common.memory.free_bytes", lambda device: int(need) - 1)
    with pytest.raises(ValueError, match=rf"^reading needs {need / 1e9:.1f} GB, {need / 1e9:.1f} GB are free: fewer$"):
        require(need, GPU, "reading", "fewer")
    require(need - 2, GPU, "reading", "fewer")
