"""What the engine refuses before it allocates anything."""

from __future__ import annotations

import torch

from ..common.memory import require
from ..common.suggest import did_you_mean
from ..core.config import Wiring
from . import KV_CACHE_DTYPES
from .executor import RING
from .schedule import plan_steps
from .spec import EngineSpec, RankSizes

DTYPES = (torch.bfloat16, torch.float16)
EXACT_DTYPE = torch.float32  # for comparisons that must not depend on rounding; the kernels are tuned for two bytes a weight
MAX_BATCH = 256
FP8_CAPABILITY = (8, 9)  # from which on GPUs convert E4M3 in hardware, and Triton compiles it
GEMM_BACKENDS = ("auto", "cublas", "triton")  # of batches 2 to 16; auto: the faster one, timed at start-up


def check_request(
    spec: EngineSpec, wiring: Wiring, *, batch: int, max_context: int, schedule: str, tp: int, rank: int = 0,
    gemm_backend: str = "auto",
) -> None:  # fmt: skip
    RankSizes.of(spec.shape, tp, rank)
    if wiring.num_layers != spec.shape.num_layers:
        raise ValueError(f"the wiring is for {wiring.num_layers} layers, the model has {spec.shape.num_layers}")
    wiring.check_tp(tp)
    if not 1 <= batch <= MAX_BATCH:
        raise ValueError(f"batch {batch} is outside 1 to {MAX_BATCH}")
    if not 2 <= max_context <= 1 << 20:
        raise ValueError(f"max_context {max_context} is outside 2 to {1 << 20}")
    if gemm_backend not in GEMM_BACKENDS:
        raise ValueError(f"unknown gemm_backend {gemm_backend!r}; choose from {', '.join(GEMM_BACKENDS)}")
    plan_steps(wiring, "serial" if schedule == "auto" else schedule)


def check_weights(dtype: torch.dtype, device: torch.device, *, exact: bool = False) -> None:
    """``exact`` lets float32 in."""
    if device.type != "cuda":
        raise ValueError(f"the CUDA engine needs weights on a GPU, they are on {device}: use the slow path")
    if dtype not in DTYPES and not (exact and dtype == EXACT_DTYPE):
        asked = ", or --engine cuda to compare" if dtype == EXACT_DTYPE else ""
        raise ValueError(f"the CUDA engine runs bfloat16 or float16, not {dtype}: use --dtype bfloat16{asked}")


def check_kv_cache(kv_cache_dtype: str, device: torch.device) -> None:
    if kv_cache_dtype not in KV_CACHE_DTYPES:
        hint = did_you_mean(kv_cache_dtype, KV_CACHE_DTYPES)
        raise ValueError(f"unknown kv-cache-dtype {kv_cache_dtype!r}{hint}; choose from {', '.join(KV_CACHE_DTYPES)}")
    found = torch.cuda.get_device_capability(device) if kv_cache_dtype == "fp8" and device.type == "cuda" else FP8_CAPABILITY
    if found < FP8_CAPABILITY:
        have, need = (".".join(map(str, version)) for version in (found, FP8_CAPABILITY))
        raise ValueError(f"an fp8 KV cache needs compute capability {need} (Ada, Hopper), this GPU has {have}: use auto")


def require_memory(
    sizes: RankSizes, dtype: torch.dtype, device: torch.device, *, batch: int, max_context: int, kv_cache_dtype: str = "auto"
) -> None:  # fmt: skip
    """The weights are on the GPU already; the cache must fit beside them."""
    need = sizes.cache_bytes(dtype.itemsize, batch, max_context, kv_cache_dtype)
    need += 40 * batch * sizes.hidden * 4 + 2 * max_context * sizes.head_dim * 4
    half = "" if kv_cache_dtype == "fp8" else ", or use --kv-cache-dtype fp8"
    require(need, device, f"the KV cache of batch {batch} at context {max_context}", "lower the batch or the context" + half)


def prefill_bytes(sizes: RankSizes, rows: int, element: int, *, in_place: bool) -> int:
    """What a prefill of ``rows`` tokens holds at once: partials (and reduced outputs, unless all-reduces are ``in_place``), the residual
    stream, and the widest module's activations."""
    outputs = (1 if in_place else 2) * (RING + 1) * sizes.hidden * element
    stream = 2 * sizes.hidden * 4 + sizes.hidden * element  # two buffers in float32, and the normed one
    mlp = 3 * sizes.intermediate * element
    attention = (sizes.qkv_width + 2 * sizes.heads * sizes.head_dim) * element
    return rows * (outputs + stream + max(mlp, attention, 2 * sizes.hidden * element))
