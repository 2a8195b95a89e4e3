"""Which kernels of a captured step wait for which to end, for the interleaved schedule.

A kernel launched with PDL is captured with *every* edge into it programmatic: from the kernel before it on the chain, and from the
all-reduces and attention kernels it joins from other streams. QKV reads before it waits (``PdlMode.WAIT_AFTER_COMPUTE``), so it must not
start before what it joins is complete: those edges become full dependencies here, before the graph is instantiated.

In a graph, of two kernels that may both start before a third ends, neither does. Behind down there are the MLP's all-reduce, which needs
down's output, and the next QKV, which reads nothing of it. So if the all-reduce is launched early, it alone keeps a programmatic edge from
down, and QKV gets a full dependency on gate/up, which precedes down and wrote the residual stream. The next gate/up may then be
on the GPU before down ends. What it reads before it waits is complete: the stream, since QKV, which triggers it, waited for the
gate/up that wrote it; and attention's all-reduce, which QKV joined. It stores nothing before the MLP's all-reduce is complete, which
waited for down. And it cannot take down's place: the all-reduce triggers it too, and that started when all of down was on the GPU.
"""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Container, Mapping

import torch

from .driver import driver
from .pdl import PdlMode

FULL = 0  # the data of an edge that waits for the end of a kernel; other values are programmatic edges
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


Edge = tuple[int, int, int]  # from node, to node, data


def can_edit_edges() -> bool:
    """Drivers from CUDA 12.3 on can."""
    return driver() is not None and all(hasattr(driver(), name) for name in CALLS)


def order_side_streams(
    graph: torch.cuda.CUDAGraph, chain: Mapping[int, PdlMode], side: Container[int], late_waits: int, all_reduces: Collection[int] = ()
) -> bool:  # fmt: skip
    """Edit the edges of a graph that was captured with ``keep_graph`` and is not instantiated.

    ``chain``: the compiled functions of the chain and their modes. ``side``: functions launched on other streams. ``late_waits``: how
    many kernels were launched in WAIT_AFTER_COMPUTE. ``all_reduces``: the functions of ``side`` that are all-reduces launched early.
    False if the graph cannot be edited, or does not show all of the late waits, each with no programmatic edge but that from down:
    it must not be run then."""
    try:
        handle = graph.raw_cuda_graph()
        edges = _edges(handle)
        functions = {node: _function(node) for edge in edges for node in edge[:2]}
        chain_nodes = {node for node, function in functions.items() if function in chain and function not in side}
        late = {node for node, function in functions.items() if chain.get(function or 0) == PdlMode.WAIT_AFTER_COMPUTE}
        reducing = {node for node, function in functions.items() if function in all_reduces}
        removed, new, moved = _changes(edges, chain_nodes, late, reducing)
        for call, changed in (("cuGraphRemoveDependencies_v2", removed), ("cuGraphAddDependencies_v2", new)):
            for start, end, data in changed:
                ends = ((ctypes.c_void_p * 1)(start), (ctypes.c_void_p * 1)(end))
                _call(call, ctypes.c_void_p(handle), *ends, (ctypes.c_uint64 * 1)(data), ctypes.c_size_t(1))
    except RuntimeError:  # the driver refuses
        return False
    programmatic = [end for _, end, data in {*edges} - {*removed} if data != FULL]
    return len(late) == late_waits and all(programmatic.count(node) <= (node not in moved) for node in late)


def _changes(
    edges: list[Edge], chain: set[int], late: set[int], all_reduces: set[int]
) -> tuple[list[Edge], list[Edge], set[int]]:  # fmt: skip
    """Edges to remove, edges to add, and the nodes of ``late`` (which read before they wait) that make way for an all-reduce."""
    programmatic = [(start, end) for start, end, data in edges if data != FULL]
    reduced_by = {start: end for start, end in programmatic if start in chain and end in all_reduces}  # down -> its all-reduce
    before_down = {end: start for start, end in programmatic if start in chain and end in reduced_by}  # down -> gate/up
    removed, new, moved = [], [], set()
    for start, end, data in edges:
        if end in late and start in before_down:
            removed.append((start, end, data))
            new.append((before_down[start], end, FULL))
            moved.add(end)
        elif end in late and data != FULL and start not in chain:
            removed.append((start, end, data))
            new.append((start, end, FULL))
        elif start in all_reduces and end in reduced_by.values():  # all on one stream: down waited for the one before already
            removed.append((start, end, data))
    return removed, new, moved


def _edges(handle: int) -> list[Edge]:
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
