"""The shared-memory carve-out: how an SM's on-chip memory is divided between L1 cache and shared memory.

Kernels with different carve-outs cannot share an SM: it must drain first. A kernel with large tiles in shared memory would neither start
while the previous one ends nor let the next one start early. Where a step has such a kernel, all kernels of its layers ask for the
same carve-out; all-reduces of NCCL and of symmetric memory have their own.
"""

from __future__ import annotations

import ctypes
from typing import Any

from .driver import driver

PREFERRED_CARVEOUT = 9  # CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
DRIVER_DEFAULT = -1
_set: dict[int, int] = {}  # by function: the driver stores it with the function, which several engines may share


def set_carveout(compiled: Any, percent: int | None) -> None:
    """Set the carve-out of a compiled kernel's later launches; None restores the driver's choice. It only affects speed, so a driver that
    refuses is ignored; so is the interpreter, which compiles nothing."""
    function = getattr(compiled, "function", None)
    wanted = DRIVER_DEFAULT if percent is None else percent
    if function is None or _set.get(function, DRIVER_DEFAULT) == wanted:
        return
    library = driver()
    if library is not None and library.cuFuncSetAttribute(ctypes.c_void_p(function), PREFERRED_CARVEOUT, wanted) == 0:
        _set[function] = wanted
