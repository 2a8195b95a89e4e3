"""Edges of a captured step, on a stand-in for the driver: tests/gpu has the real one."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import pytest

from ladder_residual.engine.cuda import graph_edges
from ladder_residual.engine.cuda.pdl import PdlMode

FULL, PROGRAMMATIC = 0, 0x10001
QKV, GATE_UP, DOWN, REDUCE, OUTPUT, COPY = 11, 12, 13, 21, 22, None  # compiled functions; a copy is no kernel
CHAIN = {QKV: PdlMode.WAIT_AFTER_COMPUTE, GATE_UP: PdlMode.WAIT_BEFORE_NEWEST, DOWN: PdlMode.WAIT_THEN_TRIGGER}


class Driver:
    """A graph of nodes (by number: the function it runs) and edges (from, to -> data)."""

    def __init__(self, functions: dict[int, int | None], edges: dict[tuple[int, int], int], refuses: str = "") -> None:
        self.functions, self.edges, self.refuses = functions, edges, refuses

    def cuGraphGetEdges_v2(self, graph, starts, ends, data, count) -> int:
        if starts is None:
            count._obj.value = len(self.edges)
        else:
            for index, ((start, end), value) in enumerate(self.edges.items()):
                starts[index], ends[index], data[index] = start, end, value
        return 0

    def cuGraphNodeGetType(self, node, kind) -> int:
        kind._obj.value = 0 if self.functions[node.value] else 1
        return 0

    def cuGraphKernelNodeGetParams_v2(self, node, parameters) -> int:
        parameters._obj.function = self.functions[node.value]
        return 0

    def cuGraphRemoveDependencies_v2(self, graph, starts, ends, data, count) -> int:
        assert self.edges.pop((starts[0], ends[0])) == data[0]
        return 0

    def cuGraphAddDependencies_v2(self, graph, starts, ends, data, count) -> int:
        self.edges[starts[0], ends[0]] = data[0]
        return 700 if self.refuses else 0


def order(monkeypatch: pytest.MonkeyPatch, made: Driver, *, side=(OUTPUT,), all_reduces=()) -> bool:
    """With one kernel that reads before it waits."""
    monkeypatch.setattr(graph_edges, "driver", lambda: made)
    assert graph_edges.can_edit_edges()
    return graph_edges.order_side_streams(SimpleNamespace(raw_cuda_graph=lambda: 99), CHAIN, side, 1, all_reduces)


def step() -> Driver:
    """Down, then QKV, which joins an all-reduce, then gate/up, which joins another and waits for it."""
    nodes = {1: DOWN, 2: REDUCE, 3: QKV, 4: REDUCE, 5: GATE_UP, 6: COPY}
    return Driver(nodes, {(1, 3): PROGRAMMATIC, (2, 3): PROGRAMMATIC, (3, 5): PROGRAMMATIC, (4, 5): PROGRAMMATIC, (6, 3): FULL})


def test_only_what_a_kernel_joins_before_it_waits_becomes_a_full_edge(monkeypatch: pytest.MonkeyPatch) -> None:
    made = step()
    assert order(monkeypatch, made)
    assert made.edges == {(1, 3): PROGRAMMATIC, (2, 3): FULL, (3, 5): PROGRAMMATIC, (4, 5): PROGRAMMATIC, (6, 3): FULL}


def test_a_kernel_that_also_runs_beside_the_chain_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """One compiled function for down and for the output projection: which of them it is cannot be told."""
    made = step()
    assert order(monkeypatch, made, side=(OUTPUT, DOWN))
    assert made.edges[1, 3] == made.edges[2, 3] == FULL


KEPT = {(1, 2): PROGRAMMATIC, (2, 4): PROGRAMMATIC, (8, 6): PROGRAMMATIC, (5, 7): PROGRAMMATIC, (4, 7): PROGRAMMATIC}


def step_with_early_all_reduces() -> Driver:
    """Gate/up, down, its all-reduce behind the one before (on one stream), then QKV, which joins attention's, then gate/up."""
    nodes = {1: GATE_UP, 2: DOWN, 3: REDUCE, 4: REDUCE, 5: QKV, 6: REDUCE, 7: GATE_UP, 8: OUTPUT}
    return Driver(nodes, {**KEPT, (3, 4): PROGRAMMATIC, (2, 5): PROGRAMMATIC, (6, 5): PROGRAMMATIC})


def test_an_early_all_reduce_has_down_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    made = step_with_early_all_reduces()
    assert order(monkeypatch, made, side=(OUTPUT, REDUCE), all_reduces=(REDUCE,))
    assert made.edges == {**KEPT, (1, 5): FULL, (6, 5): FULL}


def test_what_makes_way_for_an_all_reduce_has_no_programmatic_edge_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention's all-reduce taken for a kernel of the chain: its edge would stay programmatic, and QKV read too early."""
    made = step_with_early_all_reduces()
    made.functions[6] = GATE_UP
    assert not order(monkeypatch, made, side=(OUTPUT, REDUCE), all_reduces=(REDUCE,))


def test_without_a_gate_up_in_front_nothing_makes_way(monkeypatch: pytest.MonkeyPatch) -> None:
    made = step_with_early_all_reduces()
    made.edges[1, 2] = FULL
    assert order(monkeypatch, made, side=(OUTPUT, REDUCE), all_reduces=(REDUCE,))
    assert made.edges == {**KEPT, (1, 2): FULL, (2, 5): PROGRAMMATIC, (6, 5): FULL}


def test_a_down_that_also_runs_beside_the_chain_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    made = step_with_early_all_reduces()
    assert order(monkeypatch, made, side=(OUTPUT, REDUCE, DOWN), all_reduces=(REDUCE,))
    assert made.edges == {**KEPT, (3, 4): PROGRAMMATIC, (2, 5): FULL, (6, 5): FULL}


def test_an_all_reduce_that_is_not_early_leaves_down_to_qkv(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = {1: GATE_UP, 2: DOWN, 3: REDUCE, 4: REDUCE, 5: QKV}
    edges = {(1, 2): PROGRAMMATIC, (2, 4): FULL, (3, 4): FULL, (2, 5): PROGRAMMATIC}
    made = Driver(nodes, dict(edges))
    assert order(monkeypatch, made, all_reduces=(REDUCE,))
    assert made.edges == edges


@pytest.mark.parametrize("what", ["not found", "two programmatic", "refused"])
def test_a_graph_that_cannot_be_trusted_is_not_run(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = step()
    if what == "not found":
        made.functions[3] = 77
    elif what == "two programmatic":
        made.functions[2] = GATE_UP
    else:
        made.refuses = "yes"
    assert not order(monkeypatch, made)


def test_a_driver_without_the_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    for library in (None, SimpleNamespace(cuGraphGetEdges_v2=None)):
        monkeypatch.setattr(graph_edges, "driver", lambda library=library: library)
        assert not graph_edges.can_edit_edges()


def test_the_parameters_of_a_kernel_lie_where_the_driver_puts_them() -> None:
    assert ctypes.sizeof(graph_edges._KernelParams) == 72
    assert graph_edges._KernelParams.kernel.offset == 56
