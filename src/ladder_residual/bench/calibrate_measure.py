"""What ``ladder bench calibrate`` times: reading, multiplying, whole steps, and all-reduces over the link.

With several ranks all of them measure at once, as they will compute at once, and the slowest counts; of the repeats the best
counts, as other programs only ever slow a host down. The planner reckons with numbers of 2 bytes; with wider ones its bytes are
scaled (``UNIT_BYTES``), so that its times come out right.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch.nn import functional as F
from transformers import PreTrainedModel

from ..core.reduce import Reducer
from ..distributed.world import World
from ..generation.decode_loop import DecodeLoop, synchronize
from ..models.presets import ModelShape
from ..plan.cost import DTYPE_BYTES as UNIT_BYTES
from .overlap import COMPUTE

MESSAGE_BYTES = (4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20)
FEW_ROWS = 4
BACK_TO_BACK = 8  # all-reduces in a row, so that ranks that leave the barrier at different times do not count
STEP_MODEL, STEP_LAYERS, STEP_PROMPT = "ladder-1b", 4, 16


@dataclass(frozen=True)
class Sizes:
    """How much is read and multiplied: enough to leave the caches, not more."""

    matrix: int  # rows and columns of a square matrix
    matrices: int
    rows: int  # of the GEMM that is limited by FLOPs


SIZES = {"cpu": Sizes(2048, 12, 512), "cuda": Sizes(8192, 16, 8192)}


@dataclass(frozen=True)
class Rates:
    """Of one rank, in the planner's units."""

    memory_gb: float
    read_gbs: float
    tflops: float
    batched_read_share: float


def _best_seconds(call: Callable[[], object], world: World, repeats: int) -> float:
    call()
    times = []
    for _ in range(repeats):
        synchronize(world.device)
        world.barrier()
        start = time.perf_counter()
        call()
        synchronize(world.device)
        times.append(time.perf_counter() - start)
    return min(world.slowest(times))


@torch.inference_mode()
def measure_rates(world: World, dtype: torch.dtype, sizes: Sizes | None = None, repeats: int = 15) -> Rates:
    """Matrix times vector (a decode step reads every weight once) and matrix times matrix."""
    sizes = sizes or SIZES[world.device.type]
    n = sizes.matrix
    weights = [torch.randn(n, n, device=world.device).to(dtype) for _ in range(sizes.matrices)]
    vector, few, block = (torch.randn(rows, n, device=world.device).to(dtype) for rows in (1, FEW_ROWS, sizes.rows))
    reading = _best_seconds(lambda: [F.linear(vector, weight) for weight in weights], world, repeats)
    batched = _best_seconds(lambda: [F.linear(few, weight) for weight in weights], world, repeats)
    # On a CPU core a GEMM of few rows reads, then multiplies; a GPU hides the one behind the other.
    few_share = FEW_ROWS / sizes.rows if world.device.type == "cpu" else 0.0
    multiplying = _best_seconds(lambda: F.linear(block, weights[0]), world, repeats)
    return Rates(
        memory_gb=memory_bytes(world) * UNIT_BYTES / dtype.itemsize / 1e9,
        read_gbs=UNIT_BYTES * n * n * len(weights) / reading / 1e9,
        tflops=2 * sizes.rows * n * n / multiplying / 1e12,
        batched_read_share=min(1.0, reading / max(reading, batched - len(weights) * multiplying * few_share)),
    )


def memory_bytes(world: World) -> float:
    if world.device.type == "cuda":
        return torch.cuda.mem_get_info(world.device)[1]
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / world.size  # the ranks of a host share it


@torch.inference_mode()
def measure_link(
    world: World, dtype: torch.dtype, sizes: Sequence[int] = MESSAGE_BYTES, repeats: int = 15
) -> list[tuple[float, float]]:
    """(bytes in the planner's units, microseconds) of one all-reduce of each size."""
    reducer, samples = world.reducer(), []
    for size in sizes:
        message = torch.zeros(size // dtype.itemsize, dtype=dtype, device=world.device)

        def reduces(message: torch.Tensor = message) -> None:
            for _ in range(BACK_TO_BACK):
                reducer.start(message).wait()

        seconds = _best_seconds(reduces, world, repeats) / BACK_TO_BACK
        samples.append((size * UNIT_BYTES / dtype.itemsize, 1e6 * seconds))
    return samples


def step_shape(layers: int = STEP_LAYERS) -> ModelShape:
    return replace(ModelShape.from_name(STEP_MODEL), num_layers=layers)


@torch.inference_mode()
def measure_step(world: World, model: PreTrainedModel, wiring: str, batch: int, repeats: int = 15) -> float:
    """Milliseconds of a decode step; ``no-comm`` leaves out the all-reduce of the embedding and the gather of the logits as well."""
    reducer = Reducer() if wiring == COMPUTE else world.reducer()
    decoder = DecodeLoop(model, wiring, reducer, batch, STEP_PROMPT, world.device)
    for _ in range(2):
        decoder.step()

    def step() -> None:
        decoder.rewind()
        decoder.step()

    return 1e3 * _best_seconds(step, world, repeats)
