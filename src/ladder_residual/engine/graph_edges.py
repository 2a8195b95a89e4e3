"""Which kernels of a captured step wait for the end of which.

A kernel launched early is captured with *every* edge into it early: from the kernel before it in the line, and from sums and attention
that it joins. One that reads nothing of the kernel before it does not wait before it reads (``kernels_project.py``, PDL 3), so it must
not start before what it joins is complete. Those edges are made ordinary ones here, before the graph is instantiated.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

import torch

from .carveout import driver
from .gemv_ops import BEHIND

ORDINARY = 0
KERNEL_NODE = 0
CALLS = ("cuGraphGetEdges_v2", "cuGraphRemoveDependencies_v2", "cuGraphAddDependencies_v2", "cuGraphKernelNodeGetParams_v2")


class _KernelParams(ctypes.Structure):
    _fields_ = [
        ("function", ctypes.c_void_p),
        ("grid_block_and_shared", ctypes.c_uint * 7),
        ("parameters", ctypes.c_void_p),
        ("extra", ctypes.c_void_p),
        ("kernel", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
    ]


def can_change_edges() -> bool:
    """Drivers from CUDA 12.3 on can."""
    return driver() is not None and all(hasattr(driver(), name) for name in CALLS)


def wait_for_joined(graph: torch.cuda.CUDAGraph, line: Mapping[int, int]) -> int:
    """``line``: the line's kernels by function, and how each waits (``Launcher.functions``). Returns the number of edges changed; the
    graph must be captured with ``keep_graph`` and not yet instantiated."""
    handle = graph.raw_cuda_graph()
    functions: dict[int, int | None] = {}

    def function(node: int) -> int | None:
        if node not in functions:
            functions[node] = _function(node)
        return functions[node]

    changed = 0
    for start, end, data in _edges(handle):
        if data != ORDINARY and line.get(function(end) or 0) == BEHIND and function(start) not in line:
            ends = (_nodes(start), _nodes(end))
            _call("cuGraphRemoveDependencies_v2", ctypes.c_void_p(handle), *ends, _data(data), ctypes.c_size_t(1))
            _call("cuGraphAddDependencies_v2", ctypes.c_void_p(handle), *ends, _data(ORDINARY), ctypes.c_size_t(1))
            changed += 1
    return changed


def _edges(handle: int) -> list[tuple[int, int, int]]:
    """(from, to, data); data is 0 for an ordinary edge."""
    count = ctypes.c_size_t(0)
    _call("cuGraphGetEdges_v2", ctypes.c_void_p(handle), None, None, None, ctypes.byref(count))
    starts, ends = (ctypes.c_void_p * count.value)(), (ctypes.c_void_p * count.value)()
    data = (ctypes.c_uint64 * count.value)()
    _call("cuGraphGetEdges_v2", ctypes.c_void_p(handle), starts, ends, data, ctypes.byref(count))
    return list(zip(starts, ends, data, strict=True))


def _function(node: int) -> int | None:
    """The compiled function that a node runs; None if it is not a kernel."""
    kind = ctypes.c_int(-1)
    _call("cuGraphNodeGetType", ctypes.c_void_p(node), ctypes.byref(kind))
    if kind.value != KERNEL_NODE:
        return None
    parameters = _KernelParams()
    _call("cuGraphKernelNodeGetParams_v2", ctypes.c_void_p(node), ctypes.byref(parameters))
    return parameters.function


def _nodes(node: int) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * 1)(node)


def _data(data: int) -> ctypes.Array[ctypes.c_uint64]:
    return (ctypes.c_uint64 * 1)(data)


def _call(name: str, *arguments: object) -> None:
    result = getattr(driver(), name)(*arguments)
    if result:
        raise RuntimeError(f"{name} failed with CUDA error {result}")
