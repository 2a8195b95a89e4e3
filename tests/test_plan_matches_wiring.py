"""The planner simulates what ``wiring.py`` does: the same modules wait for the same sums, in every wiring."""

import pytest

torch = pytest.importorskip("torch")

from ladder_residual.config import Wiring  # noqa: E402
from ladder_residual.plan.cost import Work  # noqa: E402
from ladder_residual.plan.hardware import Link  # noqa: E402
from ladder_residual.plan.schedule import COMM, LayerCost, build  # noqa: E402
from ladder_residual.reduce import RecordingReducer  # noqa: E402
from ladder_residual.wiring import Branch, State, flush, step  # noqa: E402

SPECS = [
    "standard",
    "ladder",
    "ladder:2-3",
    "ladder:last-half",
    "ladder:0,2,5",
    "parallel",
    "parallel:1-3",
    "desync-2x",
    "desync-3x",
    "desync-4x",
    "desync-4x:1-2",
    "desync-5x:0-3",
    "delayed-1",
    "delayed-3",
    "delayed-2:2-4",
    "no-comm",
]


def sums_awaited_by_the_wiring(wiring: Wiring) -> list[int]:
    """For each module in order, how many sums were waited for before it ran; last, how many sums there were."""
    reducer = RecordingReducer()

    def module(x: torch.Tensor) -> torch.Tensor:
        reducer.events.append(("compute", "module"))
        return x

    state = State(torch.zeros(1))
    for layer in range(wiring.num_layers):
        state = step(wiring, layer, state, [Branch(module), Branch(module)], reducer)
    flush(state, reducer)
    counts, waits = [], 0
    for kind, _ in reducer.events:
        waits += kind == "wait"
        if kind == "compute":
            counts.append(waits)
    return [*counts, waits]


def sums_awaited_by_the_plan(wiring: Wiring) -> list[int]:
    cost = LayerCost(Work(memory_us=1), Work(memory_us=1), 1.0, Link(name="x", title="x"))
    tasks = build(wiring, cost)
    counts = []
    for task in tasks:
        if task.stream != COMM:
            awaited = max(task.needs, default=-1)  # sums run in order, so the last one needed stands for all before it
            seen = sum(other.stream == COMM for other in tasks[: awaited + 1])
            counts.append(max(seen, counts[-1] if counts else 0))
            if task.name == "attention + MLP":
                counts.append(counts[-1])
    return counts


@pytest.mark.parametrize("spec", SPECS)
def test_modules_wait_for_the_same_sums(spec):
    wiring = Wiring.parse(spec, 6)
    assert sums_awaited_by_the_plan(wiring) == sums_awaited_by_the_wiring(wiring)
