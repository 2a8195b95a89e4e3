"""The read bandwidth of a GPU: how fast a kernel that only reads can read. Measured, because datasheets promise more."""

from __future__ import annotations

from functools import partial
from statistics import median

import torch
import triton
import triton.language as tl

from ..engine.cuda.timing import time_on_device


@triton.jit
def _read_only(in_ptr, out_ptr, per_program, BLOCK: tl.constexpr):
    begin = tl.program_id(0).to(tl.int64) * per_program
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, per_program, BLOCK):
        total += tl.load(in_ptr + begin + start + tl.arange(0, BLOCK), eviction_policy="evict_first")
    tl.store(out_ptr + tl.program_id(0), tl.sum(total, axis=0))


def read_bandwidth(device: torch.device | str = "cuda", *, gigabytes: float = 4.0, repeats: int = 24) -> float:
    """Bytes per second of a read-only reduction over data far larger than the L2 cache: the best of a few grid shapes."""
    block, best = 4096, 0.0
    count = int(gigabytes * 1e9 / 4) // (block * 8448) * (block * 8448)
    data = torch.empty(count, dtype=torch.float32, device=device).normal_()
    out = torch.empty(8448, dtype=torch.float32, device=device)
    for programs in (1056, 2112, 8448):
        read = partial(_read_only[(programs,)], data, out, count // programs, BLOCK=block, num_warps=8)
        times = time_on_device(read, repeats)
        best = max(best, count * 4 / (median(times[4:]) * 1e-3))
    return best
