"""The recurrences on toy modules, and the proof of the overlap."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ladder_residual.core.config import Wiring
from ladder_residual.core.wiring import Branch, State, finalize, step
from tests.core.toy import by_hand, toy_modules
from tests.recorder import Recorder


def run(spec, modules, x, reducer):
    layers = len(modules) // 2
    wiring, state = Wiring.parse(spec, layers), State(x)
    for layer in range(layers):
        branches = [Branch(module) for module in modules[2 * layer : 2 * layer + 2]]
        state = step(wiring, layer, state, branches, reducer)
    return finalize(state, reducer)


@settings(max_examples=60)
@given(st.integers(1, 6), st.integers(1, 4), st.sampled_from([torch.float32, torch.float64, torch.bfloat16]), st.data())
def test_any_hybrid_follows_the_recurrence(layers, batch, dtype, data):
    ladder = data.draw(st.sets(st.integers(0, layers - 1)))
    modules = [module.to(dtype) for module in toy_modules(2 * layers)]
    x = torch.randn(batch, 3, 6, dtype=dtype)
    spec = "ladder:" + ",".join(map(str, ladder)) if ladder else "standard"
    recorder = Recorder()
    assert torch.equal(run(spec, modules, x, recorder), by_hand(modules, x, ladder))
    recorder.check_each_waited_once()


@pytest.mark.parametrize("spec", ["parallel", "desync-2x", "desync-3x", "delayed-1", "delayed-2", "no-comm"])
def test_one_rank_makes_the_other_wirings_what_they_reduce_to(spec):
    """With one rank nothing is missing from a partial: desync, delayed and no-comm are the standard chain."""
    modules, x = toy_modules(8), torch.randn(3, 5, 6)
    result = run(spec, modules, x, Recorder())
    if spec == "parallel":
        expected = x
        for attention, mlp in zip(modules[::2], modules[1::2], strict=True):
            expected = expected + (attention(expected) + mlp(expected))
    else:
        expected = by_hand(modules, x, ())
    torch.testing.assert_close(result, expected)


def recorded(spec, layers=4):
    modules, recorder = toy_modules(2 * layers), Recorder()
    for index, module in enumerate(modules):
        recorder.watch(module, f"h{index}")
    run(spec, modules, torch.randn(2, 3, 6), recorder)
    return recorder


def test_ladder_never_waits_for_the_all_reduce_started_just_before():
    recorder = recorded("ladder")
    recorder.check_each_waited_once()
    for k in range(7):  # every module but the last has a successor to hide under
        begun, computed = recorder.events.index(("start", k)), recorder.events.index(("compute", f"h{k + 1}"))
        assert ("wait", k) not in recorder.events[begun:computed]
    assert recorder.hidden() == [True] * 7 + [False]


def test_standard_waits_for_every_all_reduce_before_it_computes():
    recorder = recorded("standard")
    for k in range(7):
        begun, computed = recorder.events.index(("start", k)), recorder.events.index(("compute", f"h{k + 1}"))
        assert ("wait", k) in recorder.events[begun:computed]
    assert recorder.hidden() == [False] * 8


def test_a_hybrid_hides_in_its_ladder_layers():
    # The last standard MLP (3) hides too: the first ladder attention reads x_{i-2}, the stream without it.
    assert recorded("ladder:2-3").hidden() == [False, False, False, True, True, True, True, False]


def test_delayed_keeps_as_many_all_reduces_in_flight_as_it_says():
    assert recorded("delayed-1").hidden() == [True] * 7 + [False]
    events = recorded("delayed-3").events
    assert events.index(("wait", 0)) > events.index(("compute", "h3"))


def test_desync_reduces_at_every_nth_module():
    assert len([e for e in recorded("desync-2x").events if e[0] == "start"]) == 4
    assert len([e for e in recorded("desync-4x").events if e[0] == "start"]) == 2
    assert len([e for e in recorded("desync-3x").events if e[0] == "start"]) == 3  # after modules 3 and 6, and at the end
    assert not [e for e in recorded("no-comm").events if e[0] == "start"]


@settings(max_examples=30)
@given(st.integers(1, 5), st.sampled_from([0.0, 0.25, 0.7, 1.0]), st.data())
def test_an_annealed_ladder_reads_between_the_two_streams(layers, switched, data):
    chosen = data.draw(st.sets(st.integers(0, layers - 1), min_size=1))
    modules, x = [module.double() for module in toy_modules(2 * layers)], torch.randn(2, 3, 6).double()
    wiring, state, recorder = Wiring("ladder", tuple(chosen), layers), State(x), Recorder()
    for layer in range(layers):
        branches = [Branch(module) for module in modules[2 * layer : 2 * layer + 2]]
        state = step(wiring, layer, state, branches, recorder, torch.tensor(switched))
    found = finalize(state, recorder)
    recorder.check_each_waited_once()
    xs = [x]
    for i, h in enumerate(modules):
        older = xs[max(len(xs) - 2, 0)]
        read = older + (1 - switched) * (xs[-1] - older) if i // 2 in chosen else xs[-1]
        xs.append(xs[-1] + h(read))
    torch.testing.assert_close(found, xs[-1])
    if switched in (0, 1):
        assert torch.equal(found, by_hand(modules, x, chosen if switched else ()))
