"""The fused kernels of a prompt on the interpreter against plain PyTorch."""

from __future__ import annotations

import pytest
import torch

from ladder_residual.core.config import Wiring
from ladder_residual.engine.cache import KVCache
from ladder_residual.engine.ops.prefill import FusedPrefillOps, PrefillOps
from tests.engine.tiny import CPU, make_executor, random_tokens, tiny_rank, tiny_shape


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize(
    ("family", "wiring", "tp"), [("llama", "ladder", 1), ("qwen2", "desync-3x", 2), ("qwen3", "parallel", 1)]
)
def test_fused_kernels_equal_plain_pytorch(family: str, wiring: str, tp: int) -> None:
    """Logits of every position, and what is left in the cache."""
    shape = tiny_shape(family, num_heads=6, num_kv_heads=2, hidden_size=72)
    spec, sizes, weights = tiny_rank(shape, tp, tp - 1)
    batch, length = 3, 5
    tokens = random_tokens(shape, batch, length)
    found = []
    for ops in (PrefillOps, FusedPrefillOps):
        cache = KVCache(spec, sizes, batch, 16, torch.float32, CPU)
        made = ops(spec, sizes, weights, cache, length)
        logits = torch.full((batch * length, sizes.vocab_rows), float("nan"))
        make_executor(Wiring.parse(wiring, 2), "serial", made, sizes, batch * length).run(tokens, logits)
        found.append((logits, cache.keys[..., :length, :], cache.values[..., :length, :]))
    for plain, fused in zip(*found, strict=True):
        assert torch.isfinite(plain).all()
        assert plain.abs().sum() > 0
        torch.testing.assert_close(fused, plain, rtol=2e-5, atol=2e-6)
