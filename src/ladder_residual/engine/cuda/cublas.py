"""cuBLAS GEMMs that leave some SMs to the all-reduce running beside them.

On Hopper cuBLAS launches one block per SM and each block computes several tiles. Where an all-reduce occupies a few SMs, the blocks meant
for them start only when it ends: the GEMM then lasts as long as the all-reduce it should hide. With fewer SMs it runs beside the
all-reduce in one wave.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch

from .device import sm_count


@cache
def _cublas() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL(f"libcublas.so.{(torch.version.cuda or '').split('.')[0]}")  # torch has loaded it already
    except OSError:
        return None


@contextmanager
def reserve_sms(count: int, device: torch.device) -> Iterator[None]:
    """Within the block, cuBLAS GEMMs issued by this thread use all SMs but ``count``. Without the library (another vendor) nothing
    changes: it only affects speed."""
    library = _cublas() if count and device.type == "cuda" else None
    if library is None:
        yield
        return
    handle = ctypes.c_void_p(torch.cuda.current_blas_handle())
    library.cublasSetSmCountTarget(handle, sm_count(device) - count)
    try:
        yield
    finally:
        library.cublasSetSmCountTarget(handle, 0)
