"""Which kernels of a captured step wait for the end of which.

A kernel launched early is captured with *every* edge into it early: from the kernel before it in the line, and from sums and attention
that it joins. One that reads before it waits (``launcher.BEHIND``: QKV) must not start before what it joins is complete, so those edges
are made ordinary ones here, before the graph is instantiated.

And of two kernels that may both begin before the end of one, in a graph neither does. Behind down come the MLP's sum, which has its input
only then, and the next QKV, which reads nothing of it. So if the sum is launched early, it alone stays tied to down: QKV waits for
gate/up, which is in front of down and wrote the stream, by an ordinary edge, and so needs room on the card to begin, not down's leave.
The next gate/up may then be on the card before down is through. All it reads before it waits is complete: the stream, since QKV, which
lets it in, waited for the gate/up that wrote it, and attention's sum, which QKV joined. It stores nothing before the MLP's sum is there,
which waited for down. And it cannot take down's place: the sum lets it in too, and that was let in when all of down was on the card.
"""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Container, Mapping

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


Edge = tuple[int, int, int]  # from, to, data, which is 0 for an ordinary edge


def can_change_edges() -> bool:
    """Drivers from CUDA 12.3 on can."""
    return driver() is not None and all(hasattr(driver(), name) for name in CALLS)


def wait_for_joined(
    graph: torch.cuda.CUDAGraph, line: Mapping[int, int], beside: Container[int], behind: int, sums: Collection[int] = ()
) -> bool:
    """``line``: the line's compiled kernels and how each waits; ``beside``: those of other streams; ``behind``: how often one was
    started that reads before it waits; ``sums``: those of them that are sums launched early. False if the graph does not show all that
    read before they wait, each with no early edge but that from down, or cannot be changed: it must then not be run. It must have been
    captured with ``keep_graph`` and not be instantiated."""
    try:
        handle = graph.raw_cuda_graph()
        edges = _edges(handle)
        functions = {node: _function(node) for edge in edges for node in edge[:2]}
        along = {node for node, function in functions.items() if function in line and function not in beside}
        readers = {node for node, function in functions.items() if line.get(function or 0) == BEHIND}
        added = {node for node, function in functions.items() if function in sums}
        gone, new, moved = _changes(edges, along, readers, added)
        for call, changed in (("cuGraphRemoveDependencies_v2", gone), ("cuGraphAddDependencies_v2", new)):
            for start, end, data in changed:
                ends = ((ctypes.c_void_p * 1)(start), (ctypes.c_void_p * 1)(end))
                _call(call, ctypes.c_void_p(handle), *ends, (ctypes.c_uint64 * 1)(data), ctypes.c_size_t(1))
    except RuntimeError:  # the driver refuses
        return False
    early = [end for _, end, data in {*edges} - {*gone} if data != ORDINARY]
    return len(readers) == behind and all(early.count(node) <= (node not in moved) for node in readers)


def _changes(edges: list[Edge], along: set[int], readers: set[int], sums: set[int]) -> tuple[list[Edge], list[Edge], set[int]]:
    """Edges to remove, edges to add, and those of the ``readers``, which read before they wait, that make way for a sum. ``along``:
    kernels of the line."""
    early = [(start, end) for start, end, data in edges if data != ORDINARY]
    summed = {start: end for start, end in early if start in along and end in sums}  # by down
    in_front = {end: start for start, end in early if start in along and end in summed}  # gate/up, by down
    gone, new, moved = [], [], set()
    for start, end, data in edges:
        if end in readers and start in in_front:
            gone.append((start, end, data))
            new.append((in_front[start], end, ORDINARY))
            moved.add(end)
        elif end in readers and data != ORDINARY and start not in along:
            gone.append((start, end, data))
            new.append((start, end, ORDINARY))
        elif start in sums and end in summed.values():  # one stream for all sums: down waited for the one before already
            gone.append((start, end, data))
    return gone, new, moved


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
