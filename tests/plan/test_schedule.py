"""The event simulator: closed forms where there are any, invariants elsewhere."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ladder_residual.core.config import Wiring
from ladder_residual.links import Link
from ladder_residual.plan.cost import Work
from ladder_residual.plan.schedule import COMM, COMPUTE, COMPUTE_2, LayerCost, Task, Timeline, build, simulate

QUIET = Link(name="quiet", title="no contention")
times = st.floats(1.0, 500.0)
SETTINGS = settings(max_examples=60, deadline=None)


def run(spec: str, layers: int, attention: float, mlp: float, allreduce: float, link: Link = QUIET, **options) -> Timeline:
    cost = LayerCost(Work(memory_us=attention), Work(memory_us=mlp), allreduce, link)
    overlap = options.pop("stream_overlap", 1.0)
    return simulate(build(Wiring.parse(spec, layers), cost, **options), overlap)


def busy(link_share: float) -> Link:
    return Link(name="busy", title="busy", memory_contention=link_share, flop_contention=link_share)


@SETTINGS
@given(layers=st.integers(1, 8), attention=times, mlp=times, allreduce=times)
def test_standard_is_the_sum_of_compute_and_communication(layers, attention, mlp, allreduce):
    expected = layers * (attention + mlp + 2 * allreduce)
    assert run("standard", layers, attention, mlp, allreduce).us == pytest.approx(expected)


@SETTINGS
@given(layers=st.integers(1, 8), module=times, allreduce=times)
def test_a_pass_is_broken_down_into_compute_hidden_and_exposed_communication(layers, module, allreduce):
    standard = run("standard", layers, module, module, allreduce).breakdown_us()
    assert standard == pytest.approx({"compute": 2 * layers * module, "hidden": 0, "exposed": 2 * layers * allreduce}, abs=1e-6)
    ladder = run("ladder", layers, module, module, allreduce)
    parts = ladder.breakdown_us()
    assert sum(parts.values()) == pytest.approx(ladder.us)
    assert parts["hidden"] == pytest.approx((2 * layers - 1) * min(module, allreduce))
    assert parts["hidden"] + parts["exposed"] == pytest.approx(ladder.communication_us)


@SETTINGS
@given(layers=st.integers(1, 8), attention=times, mlp=times, allreduce=times, contention=st.floats(0, 0.95))
def test_no_comm_ladder_standard_are_ordered_and_ladder_keeps_its_bound(layers, attention, mlp, allreduce, contention):
    link = busy(contention)
    slowest = run("standard", layers, attention, mlp, allreduce, link).us
    ladder = run("ladder", layers, attention, mlp, allreduce, link).us
    fastest = run("no-comm", layers, attention, mlp, allreduce, link).us
    assert fastest <= ladder * (1 + 1e-9)
    assert ladder <= slowest * (1 + 1e-9)
    assert ladder >= max(fastest, 2 * layers * allreduce) * (1 - 1e-9)


@SETTINGS
@given(layers=st.integers(2, 10), module=times, allreduce=times)
def test_ladder_with_equal_modules_has_a_closed_form(layers, module, allreduce):
    modules = 2 * layers
    # The first module has nothing to hide under and the last all-reduce nothing to hide it; between them the longer one rules.
    expected = module + (modules - 1) * max(module, allreduce) + allreduce
    assert run("ladder", layers, module, module, allreduce).us == pytest.approx(expected)


@SETTINGS
@given(layers=st.integers(2, 10), data=st.data(), attention=times, mlp=times, allreduce=times, contention=st.floats(0, 0.9))
def test_a_hybrid_lies_between_ladder_and_standard(layers, data, attention, mlp, allreduce, contention):
    converted = data.draw(st.integers(1, layers))
    link = busy(contention)
    hybrid = run(f"ladder:last-{converted}", layers, attention, mlp, allreduce, link).us
    assert run("ladder", layers, attention, mlp, allreduce, link).us <= hybrid * (1 + 1e-9)
    assert hybrid <= run("standard", layers, attention, mlp, allreduce, link).us * (1 + 1e-9)


@SETTINGS
@given(layers=st.integers(1, 8), attention=times, mlp=times, allreduce=times)
def test_delayed_by_one_has_the_times_of_ladder_and_more_delay_never_hurts(layers, attention, mlp, allreduce):
    ladder = run("ladder", layers, attention, mlp, allreduce).us
    assert run("delayed-1", layers, attention, mlp, allreduce).us == pytest.approx(ladder)
    assert run("delayed-3", layers, attention, mlp, allreduce).us <= ladder * (1 + 1e-9)


@SETTINGS
@given(layers=st.integers(1, 9), step=st.integers(2, 7), attention=times, mlp=times, allreduce=times)
def test_desync_reduces_every_nth_module_and_once_at_the_end(layers, step, attention, mlp, allreduce):
    modules = 2 * layers
    reduces = modules // step + (1 if modules % step else 0)
    expected = layers * (attention + mlp) + reduces * allreduce
    assert run(f"desync-{step}x", layers, attention, mlp, allreduce).us == pytest.approx(expected)


@SETTINGS
@given(layers=st.integers(1, 8), attention=times, mlp=times, allreduce=times)
def test_parallel_reduces_once_per_layer(layers, attention, mlp, allreduce):
    assert run("parallel", layers, attention, mlp, allreduce).us == pytest.approx(layers * (attention + mlp + allreduce))


@SETTINGS
@given(layers=st.integers(1, 8), attention=times, mlp=times, allreduce=st.floats(0, 300), overlap=st.floats(0, 1))
def test_two_streams_are_bounded_by_each_stream_and_by_taking_turns(layers, attention, mlp, allreduce, overlap):
    us = run("ladder", layers, attention, mlp, allreduce, two_stream=True, stream_overlap=overlap).us
    # Within a stream nothing overlaps: attention waits for the all-reduce of the attention before it, the MLP likewise.
    assert us >= layers * (max(attention, mlp) + allreduce) * (1 - 1e-9)
    assert us <= layers * (attention + mlp + 2 * allreduce) * (1 + 1e-9)


def test_two_streams_reproduce_the_lock_step_of_the_recurrence():
    """Attention 10, MLP 40, all-reduce 20 and no demand for memory: a layer takes MLP + all-reduce."""
    cost = LayerCost(Work(overhead_us=10), Work(overhead_us=40), 20, QUIET)
    us = [simulate(build(Wiring.parse("ladder", n), cost, two_stream=True), 1.0).us for n in (10, 11)]
    assert us[1] - us[0] == pytest.approx(60)


def test_streams_that_demand_all_of_the_memory_gain_nothing():
    assert run("ladder", 6, 30, 50, 0, two_stream=True).us == pytest.approx(6 * 80)


def test_hidden_share_counts_what_runs_beside_compute():
    line = run("ladder", 20, 50, 50, 10)
    assert line.hidden_share() == pytest.approx(1 - 1 / 40)  # only the last of 40 all-reduces is exposed
    assert run("standard", 20, 50, 50, 10).hidden_share() == pytest.approx(0)
    assert run("no-comm", 20, 50, 50, 10).hidden_share() == 1.0


def test_every_task_starts_after_what_it_needs_and_streams_run_in_order():
    tasks = run("ladder:2-3", 5, 20, 70, 45, busy(0.4), edge_us=30, head=Work(memory_us=9)).tasks
    for task in tasks:
        assert task.end >= task.start >= max((tasks[need].end for need in task.needs), default=0.0)
    for stream in (COMPUTE, COMM):
        spans = [(task.start, task.end) for task in tasks if task.stream == stream]
        assert all(a[1] <= b[0] for a, b in pairwise(spans))


def test_the_border_of_a_hybrid_waits_where_the_recurrence_says():
    """The first ladder attention reads x_{i-2}: it starts while the all-reduce of the last standard MLP runs."""
    tasks = run("ladder:1", 3, 10, 10, 100).tasks
    border = next(task for task in tasks if task.layer == 1 and task.name == "attention")
    before = next(task for task in tasks if task.layer == 0 and task.name == "all-reduce of MLP")
    assert border.start == pytest.approx(before.start)
    back = next(task for task in tasks if task.layer == 2 and task.name == "attention")
    assert back.start == pytest.approx(max(task.end for task in tasks if task.layer == 1))


def test_contention_slows_only_what_runs_beside_an_all_reduce():
    tasks = [
        Task("compute", 0, COMPUTE, 100, slowdown=0.5),
        Task("all-reduce", 0, COMM, 40),
        Task("other stream", 0, COMPUTE_2, 0),
    ]
    assert simulate(tasks).us == pytest.approx(120)  # 40 us at half speed, then 80 us alone


@pytest.mark.parametrize(("wire_share", "layer_us"), [(0.0, 41.0), (1.0, 80.0)])
def test_two_communicators_pass_each_others_latency_but_share_the_wire(wire_share, layer_us):
    """Hardly any compute: a layer of the ladder takes one all-reduce if they are latency, two if they are bytes."""
    cost = LayerCost(Work(memory_us=1), Work(memory_us=1), 40.0, QUIET, communicators=2, wire_share=wire_share)
    times = [simulate(build(Wiring.parse("ladder", layers), cost)).us for layers in (20, 40)]
    assert (times[1] - times[0]) / 20 == pytest.approx(layer_us, abs=1.0)
    standard = simulate(build(Wiring.parse("standard", 4), cost)).us
    assert standard == pytest.approx(4 * 2 * 41.0)  # blocking all-reduces never meet


def test_one_communicator_takes_the_all_reduces_in_turn():
    cost = LayerCost(Work(memory_us=1), Work(memory_us=1), 40.0, QUIET)
    times = [simulate(build(Wiring.parse("ladder", layers), cost)).us for layers in (20, 40)]
    assert (times[1] - times[0]) / 20 == pytest.approx(80.0, abs=2.0)
