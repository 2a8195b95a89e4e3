"""Edges of a captured step, on a stand-in for the driver: tests/gpu has the real one."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import pytest

from ladder_residual.engine import graph_edges
from ladder_residual.engine.launcher import BEHIND, BEHIND_BUT_NEWEST

EARLY = 0x10001
QKV, GATE_UP, DOWN, SUM, OUTPUT, COPY = 11, 12, 13, 21, 22, None  # compiled functions; a copy is no kernel
LINE = {QKV: BEHIND, GATE_UP: BEHIND_BUT_NEWEST, DOWN: 2}


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


def settle(monkeypatch: pytest.MonkeyPatch, made: Driver, *, behind: int, beside=(OUTPUT,), sums=()) -> bool:
    monkeypatch.setattr(graph_edges, "driver", lambda: made)
    assert graph_edges.can_change_edges()
    return graph_edges.wait_for_joined(SimpleNamespace(raw_cuda_graph=lambda: 99), LINE, beside, behind, sums)


def step() -> Driver:
    """Down, then QKV, which joins a sum, then gate/up, which joins another and waits for it."""
    nodes = {1: DOWN, 2: SUM, 3: QKV, 4: SUM, 5: GATE_UP, 6: COPY}
    return Driver(nodes, {(1, 3): EARLY, (2, 3): EARLY, (3, 5): EARLY, (4, 5): EARLY, (6, 3): 0})


def test_only_what_a_kernel_joins_before_it_waits_becomes_ordinary(monkeypatch: pytest.MonkeyPatch) -> None:
    made = step()
    assert settle(monkeypatch, made, behind=1)
    assert made.edges == {(1, 3): EARLY, (2, 3): 0, (3, 5): EARLY, (4, 5): EARLY, (6, 3): 0}


def test_a_kernel_that_also_runs_beside_the_line_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """One compiled function for down and for attention's output product: which of them it is cannot be told."""
    made = step()
    assert settle(monkeypatch, made, behind=1, beside=(OUTPUT, DOWN))
    assert made.edges[1, 3] == made.edges[2, 3] == 0


KEPT = {(1, 2): EARLY, (2, 4): EARLY, (8, 6): EARLY, (5, 7): EARLY, (4, 7): EARLY}


def step_with_early_sums() -> Driver:
    """Gate/up, down, its sum behind the sum before (one stream for both), then QKV, which joins attention's, then gate/up."""
    nodes = {1: GATE_UP, 2: DOWN, 3: SUM, 4: SUM, 5: QKV, 6: SUM, 7: GATE_UP, 8: OUTPUT}
    return Driver(nodes, {**KEPT, (3, 4): EARLY, (2, 5): EARLY, (6, 5): EARLY})


def test_an_early_sum_has_down_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    made = step_with_early_sums()
    assert settle(monkeypatch, made, behind=1, beside=(OUTPUT, SUM), sums=(SUM,))
    assert made.edges == {**KEPT, (1, 5): 0, (6, 5): 0}


def test_what_makes_way_for_a_sum_has_no_early_edge_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention's sum taken for a kernel of the line: its edge would stay early, and QKV read what is still being made."""
    made = step_with_early_sums()
    made.functions[6] = GATE_UP
    assert not settle(monkeypatch, made, behind=1, beside=(OUTPUT, SUM), sums=(SUM,))


def test_without_a_gate_up_in_front_nothing_makes_way(monkeypatch: pytest.MonkeyPatch) -> None:
    made = step_with_early_sums()
    made.edges[1, 2] = 0
    assert settle(monkeypatch, made, behind=1, beside=(OUTPUT, SUM), sums=(SUM,))
    assert made.edges == {**KEPT, (1, 2): 0, (2, 5): EARLY, (6, 5): 0}


def test_a_down_that_also_runs_beside_the_line_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    made = step_with_early_sums()
    assert settle(monkeypatch, made, behind=1, beside=(OUTPUT, SUM, DOWN), sums=(SUM,))
    assert made.edges == {**KEPT, (3, 4): EARLY, (2, 5): 0, (6, 5): 0}


def test_a_sum_that_is_not_early_leaves_down_to_qkv(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = {1: GATE_UP, 2: DOWN, 3: SUM, 4: SUM, 5: QKV}
    edges = {(1, 2): EARLY, (2, 4): 0, (3, 4): 0, (2, 5): EARLY}
    made = Driver(nodes, dict(edges))
    assert settle(monkeypatch, made, behind=1, sums=(SUM,))
    assert made.edges == edges


@pytest.mark.parametrize("what", ["not found", "two early", "refused"])
def test_a_graph_that_cannot_be_trusted_is_not_run(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = step()
    if what == "not found":
        made.functions[3] = 77
    elif what == "two early":
        made.functions[2] = GATE_UP
    else:
        made.refuses = "yes"
    assert not settle(monkeypatch, made, behind=1)


def test_a_driver_without_the_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    for library in (None, SimpleNamespace(cuGraphGetEdges_v2=None)):
        monkeypatch.setattr(graph_edges, "driver", lambda library=library: library)
        assert not graph_edges.can_change_edges()


def test_the_parameters_of_a_kernel_lie_where_the_driver_puts_them() -> None:
    assert ctypes.sizeof(graph_edges._KernelParams) == 72
    assert graph_edges._KernelParams.kernel.offset == 56
