"""Which kernels of a captured step wait for the end of which.

A kernel launched early is captured with *every* edge into it early: from the kernel before it in the line, and from sums and attention
that it joins. One that reads before it waits (``launcher.BEHIND``) must not start before what it joins is complete, so those edges
are made ordinary ones here, before the graph is instantiated.
"""

from __future__ import annotations

import ctypes
from collections.abc import Container, Mapping

import torch

from .driver import driver
from .launcher import BEHIND

ORDINARY = 0
KERNEL_NODE = 0
CALLS = (
    "cuGraphGetEdges_v2",
    "cuGraphNodeGetType",
    "cuGraphKernelNodeGetParams_v2",
    "cuGraphRemoveDependencies_v2",
    "cuGraphAddDependencies_v2",
)


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


def wait_for_joined(
    graph: torch.cuda.CUDAGraph, line: Mapping[int, int], beside: Container[int], behind: int
) -> bool:  # fmt: skip
    """``line``: the line's compiled kernels and how each waits; ``beside``: those of other streams; ``behind``: how often one was
    started that reads before it waits. False if the graph does not show them all, each with one early edge at most, or cannot be
    changed: it must then not be run. It must have been captured with ``keep_graph`` and not be instantiated."""
    try:
        left = _early_edges_left(graph.raw_cuda_graph(), line, beside)
    except RuntimeError:  # the driver refuses
        return False
    return len(left) == behind and all(count <= 1 for count in left.values())


def _early_edges_left(handle: int, line: Mapping[int, int], beside: Container[int]) -> dict[int, int]:
    """Makes the others ordinary. By kernel that reads before it waits: the edges along the line."""
    functions: dict[int, int | None] = {}
    left: dict[int, int] = {}
    for start, end, data in _edges(handle):
        for node in (start, end):
            if node not in functions:
                functions[node] = _function(node)
        if line.get(functions[end] or 0) != BEHIND:
            continue
        left.setdefault(end, 0)
        if data == ORDINARY:
            continue
        if functions[start] in line and functions[start] not in beside:
            left[end] += 1
            continue
        ends = ((ctypes.c_void_p * 1)(start), (ctypes.c_void_p * 1)(end))
        for call, edge in (("cuGraphRemoveDependencies_v2", data), ("cuGraphAddDependencies_v2", ORDINARY)):
            _call(call, ctypes.c_void_p(handle), *ends, (ctypes.c_uint64 * 1)(edge), ctypes.c_size_t(1))
    return left


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


def _call(name: str, *arguments: object) -> None:
    result = getattr(driver(), name)(*arguments)
    if result:
        raise RuntimeError(f"{name} failed with CUDA error {result}")
