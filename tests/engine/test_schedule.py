"""Plans as data. ``tests/core/test_dependencies.py`` holds what they read against the wirings, ``test_executor.py`` runs them."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from ladder_residual.core.config import Wiring
from ladder_residual.engine.executor import RING
from ladder_residual.engine.schedule import SCHEDULES, Plan, available_schedules, plan_steps

LAYERS = 6


def plan_of(spec: str, schedule: str = "serial", layers: int = LAYERS) -> Plan:
    return plan_steps(Wiring.parse(spec, layers), schedule)


@pytest.mark.parametrize(
    ("spec", "count"), [("standard", 12), ("ladder", 12), ("parallel", 6), ("desync-2x", 6), ("desync-5x", 3), ("no-comm", 0)]
)
def test_number_of_all_reduces(spec: str, count: int) -> None:
    assert sum(step.reduce for step in plan_of(spec).steps) == count


def test_an_interleaved_ladder_reads_nothing_of_the_kernel_before() -> None:
    """What the persistent kernels rely on. Before QKV the chain has down of the layer before, before gate/up QKV: neither their outputs
    nor a stream that they write is read."""
    plan = plan_of("ladder", "interleaved")
    assert plan.can_read_before_wait
    stored = tuple(replace(step, read_only=False) for step in plan.steps)
    assert not replace(plan, steps=stored).can_read_before_wait  # gate/up would read a stream that QKV, just before it, stores
    assert plan.num_chains == 1
    for before, step in pairwise(plan.steps):
        assert before.output not in step.adds
        assert step.read_only == (step.kind == "attention")  # QKV stores no stream, an MLP's is stored before down
        if step.kind == "attention" and step.layer:
            assert step.adds == (step.output - 2,)  # beside what the MLP before it has stored
        if step.kind == "mlp" and step.layer:
            assert step.adds == (step.output - 3, step.output - 2)  # one that QKV waited for; the newest comes last
    others = [
        ("ladder", "serial"), ("ladder", "two_stream"), ("ladder:1-5", "interleaved"), ("parallel", "interleaved"),
        ("standard", "interleaved"),
    ]  # fmt: skip
    assert not any(plan_of(spec, schedule).can_read_before_wait for spec, schedule in others)


def test_only_layers_whose_mlp_does_not_wait_for_attention_are_interleaved() -> None:
    plan = plan_of("ladder:2,3", "interleaved")
    assert [step.name for step in plan.steps if plan.runs_beside_mlp(step)] == ["attention 2", "attention 3"]
    assert not any(plan_steps(plan.wiring).runs_beside_mlp(step) for step in plan.steps)
    assert [plan_steps(plan.wiring, name).schedule for name in SCHEDULES] == list(SCHEDULES)
    assert plan_of("standard", "interleaved").schedule == "serial"
    assert available_schedules(plan.wiring) == SCHEDULES
    assert available_schedules(Wiring.parse("parallel", LAYERS)) == ("serial", "interleaved")
    assert available_schedules(Wiring.parse("desync-2x", LAYERS)) == ("serial",)
    for spec in ("delayed-1", "delayed-3", "delayed-1:2-4"):  # an MLP reads its layer's own attention partial at once
        assert plan_of(spec, "interleaved").schedule == "serial"


def test_two_chains_wait_only_for_the_other_chain() -> None:
    plan = plan_of("ladder", "two_stream")
    newest = {0: 0, 1: 0}
    for step in plan.steps:
        newest[step.chain] = max((newest[step.chain], *step.adds))
        assert newest[step.chain] == max(step.output - 2, 0)  # x_{i-2}
    assert plan.head.adds == (2 * LAYERS - 1, 2 * LAYERS)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("spec", ["ladder", "ladder:3-5", "ladder:1,4"])
def test_ring_is_never_overwritten_while_needed(spec: str, schedule: str) -> None:
    """A slot is reused RING steps later; by then every consumer must be *ordered* before the writer, not merely earlier in the list."""
    plan = plan_of(spec, schedule)
    steps = [*plan.steps, plan.head]
    before: dict[int, set[int]] = {}  # step index -> indices known finished when it starts
    last_of_chain: dict[int, int] = {}
    maker = {step.output: i for i, step in enumerate(plan.steps)}
    for i, step in enumerate(steps):
        known: set[int] = set()
        for j in [last_of_chain.get(step.chain), *(maker[output] for output in step.adds if output)]:
            if j is not None:
                known |= before[j] | {j}
        before[i] = known
        last_of_chain[step.chain] = i
        if i >= RING and i < len(plan.steps):
            for consumer in plan.consumers(steps[i - RING].output):
                assert steps.index(consumer) in known


def test_a_plan_answers_without_comparing_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked for every step of every prompt while the GPU waits: a search through the steps took 6 to 8 ms of a fast host's time."""
    plan = plan_of("ladder:2")

    def compared(self, other):
        raise AssertionError("a step was compared with another")

    monkeypatch.setattr(type(plan.steps[0]), "__eq__", compared)
    assert [step.name for step in plan.steps if plan.overlaps(step)] == ["mlp 1", "attention 2"]
    assert [step.name for step in plan.consumers(plan.steps[0].output)] == ["mlp 0"]


def test_refusals() -> None:
    with pytest.raises(ValueError, match="delayed-1 to delayed-4, not delayed-5"):
        plan_of("delayed-5")
    with pytest.raises(ValueError, match="unknown schedule 'three'; choose from auto, serial, two_stream, interleaved"):
        plan_of("ladder", "three")
    with pytest.raises(ValueError, match="two_stream needs a ladder wiring, parallel has one chain: use serial"):
        plan_of("parallel", "two_stream")
