"""Matrix products that leave some multiprocessors to the sums running beside them.

On Hopper cuBLAS launches one block per multiprocessor and each block takes several tiles. Where an all-reduce holds a few
multiprocessors, the blocks meant for them start only when it ends: the product then lasts as long as the sum it should hide.
Told to use fewer multiprocessors, it runs beside the sum in one wave.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch


def multiprocessors(device: torch.device) -> int:
    """Of the card; the interpreter, which runs programs one after another, gets two."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def shared_memory(device: torch.device) -> int:
    """Bytes that one program may take of it; the interpreter, which has none, gets a Hopper card's."""
    if device.type != "cuda":
        return 227 << 10
    from triton.runtime import driver

    index = torch.cuda.current_device() if device.index is None else device.index
    return driver.active.utils.get_device_properties(index)["max_shared_mem"]


def hopper(device: torch.device) -> bool:
    """Whether kernels may be launched early and one instruction ask for many bytes: Hopper and later cards, not the interpreter."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


@cache
def _cublas() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL(f"libcublas.so.{(torch.version.cuda or '').split('.')[0]}")  # torch has loaded it already
    except OSError:
        return None


@contextmanager
def products_leave(count: int, device: torch.device) -> Iterator[None]:
    """Within the block, cuBLAS products issued by this thread use all multiprocessors but ``count``. Without the library (another
    vendor) nothing changes: the setting only concerns speed."""
    library = _cublas() if count and device.type == "cuda" else None
    if library is None:
        yield
        return
    handle = ctypes.c_void_p(torch.cuda.current_blas_handle())
    library.cublasSetSmCountTarget(handle, multiprocessors(device) - count)
    try:
        yield
    finally:
        library.cublasSetSmCountTarget(handle, 0)
