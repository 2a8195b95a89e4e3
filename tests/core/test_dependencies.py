"""Every other statement of a recurrence against ``core/wiring.py``: symbols, planner, engine, vLLM plugin and dry run of training.

The oracle runs ``wiring.step`` on numbers. Four ranks are stacked in one tensor, and every module returns a unit vector of its own on
each rank. So the stream a module reads says which outputs are in it, of which rank, and how often.
"""

import importlib.util
import sys
from types import SimpleNamespace

import pytest
import torch

from ladder_residual.core.config import Wiring
from ladder_residual.core.dependencies import dependencies
from ladder_residual.core.reduce import Pending, Reducer, Reduction
from ladder_residual.core.wiring import Branch, State, finalize, step
from ladder_residual.engine.schedule import SCHEDULES, plan_steps
from ladder_residual.links.link import Link
from ladder_residual.plan.cost import Work
from ladder_residual.plan.schedule import LayerCost, build, is_communication
from ladder_residual.train.dry_run import all_reduce_seconds
from tests.recorder import Recorder

RANKS, LAYERS = 4, 6
OUTPUTS = 2 * LAYERS + 1  # the embedding's included
KINDS = [
    "standard",
    "ladder",
    "parallel",
    "desync-2x",
    "desync-3x",
    "desync-4x",
    "delayed-1",
    "delayed-2",
    "delayed-3",
    "no-comm",
]
HYBRIDS = [
    *(f"ladder:{layers}" for layers in ("2-3", "last-half", "0,2,5", "1-4", "0")),
    *(f"parallel:{layers}" for layers in ("1-3", "0,5")),
    *("desync-2x:1-2", "desync-3x:0,3-4", "desync-4x:1-2", "desync-5x:0-3"),
    *("delayed-1:0-2", "delayed-2:2-4", "delayed-3:1-5", "no-comm:2-3"),
]
SPECS = [*KINDS, *HYBRIDS]


def unit(output):
    """A partial on every rank: [rank that holds it, rank it is of, output]."""
    value = torch.zeros(RANKS, RANKS, OUTPUTS, dtype=torch.float64)
    value[range(RANKS), range(RANKS), output] = 1
    return value


def reduced(partial):
    return partial.sum(0, keepdim=True).expand_as(partial)


class StackedReducer(Reducer):
    """Four ranks in one tensor."""

    size = RANKS

    def start(self, partial):
        return Pending(reduced(partial), Reduction(self))


class Chain:
    """The wiring's own answer: what each module and then the head reads, and how all-reduces and modules alternate."""

    def __init__(self, wiring):
        self.reads, self.recorder = [], Recorder(StackedReducer())
        state = State(reduced(unit(0)))
        for layer in range(wiring.num_layers):
            state = step(wiring, layer, state, [Branch(self.module), Branch(self.module)], self.recorder)
        self.module(finalize(state, self.recorder))

    def module(self, stream):
        self.reads.append(stream)
        self.recorder.events.append(("compute", str(len(self.reads))))
        return unit(min(len(self.reads), OUTPUTS - 1))

    @property
    def all_reduces(self):
        return len(self.recorder.reductions)

    def waits(self):
        """For each module and the head, how many all-reduces were waited for before it."""
        counts, waits = [], 0
        for kind, _ in self.recorder.events:
            waits += kind == "wait"
            if kind == "compute":
                counts.append(waits)
        return counts


def check_reads(found, expected):
    """Symbols of one rank, or numbers of four."""
    assert len(found) == len(expected)
    for number, (one, other) in enumerate(zip(found, expected, strict=True), start=1):
        if not isinstance(one, torch.Tensor):
            value = torch.zeros_like(other)
            for output, (own, others) in one.items():
                value[..., output] = float(others)
                value[range(RANKS), range(RANKS), output] = float(own)
            one = value
        torch.testing.assert_close(one, other, msg=f"output {number} reads another stream")


@pytest.fixture(params=SPECS)
def wiring(request):
    return Wiring.parse(request.param, LAYERS)


@pytest.fixture
def chain(wiring):
    return Chain(wiring)


def test_symbols_follow_the_numbers(wiring, chain):
    found = dependencies(wiring)
    check_reads(found.reads, chain.reads)
    chain.recorder.check_each_waited_once()
    assert len(found.all_reduces) == chain.all_reduces
    assert [each.modules_between > 0 for each in found.all_reduces] == chain.recorder.hidden()
    for number, each in enumerate(found.all_reduces):
        before = [
            name for kind, name in chain.recorder.events[: chain.recorder.events.index(("start", number))] if kind == "compute"
        ]
        after = [
            name for kind, name in chain.recorder.events[chain.recorder.events.index(("wait", number)) :] if kind == "compute"
        ]
        assert (before[-1], after[0]) == (str(each.started_after), str(each.waited_before))


def test_the_planner_waits_for_the_same_all_reduces(wiring, chain):
    tasks = build(
        wiring, LayerCost(Work(memory_us=1), Work(memory_us=1), 1.0, Link(name="x", title="x")), head=Work(memory_us=1)
    )
    counts = []
    for task in tasks:
        if not is_communication(task.stream):
            awaited = max(task.needs, default=-1)  # all-reduces run in order, so the last one needed stands for all before it
            seen = sum(is_communication(other.stream) for other in tasks[: awaited + 1])
            counts += [max(seen, counts[-1] if counts else 0)] * (2 if task.name == "attention + MLP" else 1)
    assert counts == chain.waits()


def engine_reads(wiring, schedule):
    """What the kernels of a plan would read: each chain has a stream of its own."""
    plan = plan_steps(wiring, schedule)
    zero = torch.zeros_like(unit(0))
    streams, partials, outputs, reads = [zero] * plan.num_chains, {}, {0: reduced(unit(0))}, []
    for each in (*plan.steps, plan.head):
        stream = (streams[each.chain] if each.keeps_stream else zero) + sum((outputs[number] for number in each.adds), zero)
        stream = stream + sum((partials[number] for number in each.adds_own), zero)
        if each.stores_stream:
            streams[each.chain] = stream
        if each.kind == "join":
            continue
        if each.kind == "average":
            partials[each.output] = stream / RANKS
        else:
            reads.append(stream)
            partials[each.output] = unit(max(each.output, 0))
        if each.partial_adds_stream:
            partials[each.output] = partials[each.output] + stream / RANKS
        if each.partial_adds_output is not None:
            partials[each.output] = partials[each.output] + partials[each.partial_adds_output]
        outputs[each.output] = reduced(partials[each.output]) if each.reduce else partials[each.output]
        if each.reduces_others:
            outputs[each.output] = outputs[each.output] - partials[each.output]
    return plan, reads


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_engine_reads_the_same_outputs(wiring, chain, schedule):
    if schedule == "two_stream" and wiring.kind not in ("ladder", "standard"):
        with pytest.raises(ValueError, match="needs a ladder wiring"):
            plan_steps(wiring, schedule)
        return
    plan, reads = engine_reads(wiring, schedule)
    check_reads(reads, chain.reads)
    assert sum(step.reduce for step in plan.steps) == chain.all_reduces


@pytest.fixture
def vllm_boundaries(monkeypatch):
    """``vllm_plugin.plan`` needs no vLLM, but its package refuses to be imported without."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: SimpleNamespace(origin="here"))
    known = set(sys.modules)
    from ladder_residual.vllm_plugin.plan import boundaries

    yield boundaries
    for name in set(sys.modules) - known:
        del sys.modules[name]


def test_the_vllm_models_read_the_same_outputs(wiring, chain, vllm_boundaries):
    stream, in_flight, beside, reads = reduced(unit(0)), [], 0, []
    for number, boundary in enumerate(vllm_boundaries(wiring), start=1):
        reads.append(stream)
        partial, beside = unit(number) + beside, 0
        if boundary.joins == "with next":
            beside = partial
            continue
        if boundary.joins == "reduced":
            in_flight.append(reduced(partial))
        elif boundary.joins == "own first":
            stream = stream + partial
            in_flight.append(reduced(partial) - partial)
        elif boundary.joins == "averaged":
            stream = reduced(partial + stream / RANKS)
        else:
            assert boundary.joins == "local"
            stream = stream + partial
        while len(in_flight) > boundary.in_flight:
            stream = stream + in_flight.pop(0)
        if boundary.average_streams:
            stream = reduced(stream / RANKS)
    check_reads([*reads, stream], chain.reads)


def test_the_dry_run_of_training_counts_the_same_all_reduces(wiring, chain):
    hidden = sum(chain.recorder.hidden())
    assert all_reduce_seconds(wiring, one=1.0, module=0.0) == (chain.all_reduces, 0)
    assert all_reduce_seconds(wiring, one=1.0, module=2.0) == (chain.all_reduces - hidden, hidden)
    assert all_reduce_seconds(wiring, one=3.0, module=2.0) == (3 * chain.all_reduces - 2 * hidden, 2 * hidden)


@pytest.mark.parametrize("spec", ["ladder", "desync-2x"])
def test_a_config_of_absurdly_many_layers_does_not_hang_the_planner(spec):
    assert len(dependencies(Wiring.parse(spec, 10_000)).all_reduces) == (20_000 if spec == "ladder" else 10_000)
