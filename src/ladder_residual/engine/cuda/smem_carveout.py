"""How a multiprocessor's memory is divided between L1 cache and shared memory.

Kernels that differ in it cannot be on a multiprocessor together: it must first be empty. A kernel with large tiles in shared memory
would thus neither begin while the one before it ends nor let the next one begin early. Where a step has such a kernel, all
kernels of its layers ask for the same division; sums of NCCL and of symmetric memory have their own.
"""

from __future__ import annotations

import ctypes
from typing import Any

from .driver import driver

PREFERRED_CARVEOUT = 9  # CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
DRIVERS_CHOICE = -1
_set: dict[int, int] = {}  # by function: the driver keeps it with the function, which several engines may share


def set_carveout(compiled: Any, percent: int | None) -> None:
    """For the launches of a compiled kernel from here on. Only speed hangs on it, so a driver without it changes nothing; nor does the
    interpreter, which compiles no kernel."""
    function = getattr(compiled, "function", None)
    wanted = DRIVERS_CHOICE if percent is None else percent
    if function is None or _set.get(function, DRIVERS_CHOICE) == wanted:
        return
    library = driver()
    if library is not None and library.cuFuncSetAttribute(ctypes.c_void_p(function), PREFERRED_CARVEOUT, wanted) == 0:
        _set[function] = wanted
