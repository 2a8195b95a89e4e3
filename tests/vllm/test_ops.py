"""The order in which all-reduces are issued and joined, with a reducer that records it; no engine is started here."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
import torch
from torch import Tensor

from ladder_residual.core.reduce import CompletedWork, Reducer, ReduceWork
from ladder_residual.vllm_plugin import communicator as module
from ladder_residual.vllm_plugin import ops

STREAM, WEIGHT, EPSILON = torch.full((2, 4), 100.0), torch.ones(4), 1e-6


class Recorded(ReduceWork):
    def __init__(self, result: Tensor, events: list[str]) -> None:
        self.result, self.events = result, events

    def wait(self) -> Tensor:
        self.events.append("join")
        return self.result


class TwoEqualRanks(Reducer):
    def __init__(self) -> None:
        self.events: list[str] = []

    def launch(self, partial: Tensor) -> ReduceWork:
        self.events.append("issue")
        return Recorded(2 * partial, self.events)


class InLine(Reducer):
    def __init__(self, events: list[str]) -> None:
        self.events = events

    def launch(self, partial: Tensor) -> ReduceWork:
        self.events.append("in line")
        return CompletedWork(2 * partial)


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The process's communicator, without a process group."""
    communicator = object.__new__(module.Communicator)
    communicator.cuda, communicator.reducer, communicator.in_flight = False, TwoEqualRanks(), deque()
    monkeypatch.setattr(module, "_opened", [communicator])
    return communicator


def partial(value: float) -> Tensor:
    return torch.full((2, 4), float(value))


def boundary(
    new: Tensor,
    in_flight: list[Tensor],
    *,
    keep: int = 0,
    after: list[Tensor] | None = None,
    arrived: bool = False,
    own_joined: bool = False,
    own_first: bool = False,
) -> float:
    """The stream after a boundary, which is the same number everywhere."""
    if keep > len(in_flight) and not own_first:  # nothing joins
        x, stream = torch.ops.ladder_residual.begin(new, in_flight, STREAM, WEIGHT, EPSILON, 0.0, arrived, True), STREAM
    else:
        flags = (keep, arrived, own_joined, own_first, True)
        x, stream = torch.ops.ladder_residual.boundary(new, in_flight, STREAM, WEIGHT, EPSILON, 0.0, after or [], *flags)
    torch.testing.assert_close(x, torch.ones_like(x))  # normed
    assert (stream == stream[0, 0]).all()
    return stream[0, 0].item()


def test_a_ladder_adds_what_is_one_module_old(here: Any) -> None:
    first, second = partial(1), partial(10)
    assert boundary(first, [], keep=1) == 100
    assert boundary(second, [first], keep=1) == 102
    assert here.reducer.events == ["issue", "issue", "join"]
    latest, stream = torch.ops.ladder_residual.drain(partial(0.5), [second], STREAM, EPSILON, 0.0, [], False, False)
    assert (latest == 1).all()
    assert (stream == 120).all()
    assert not here.in_flight


def test_delayed_adds_its_own_at_once_and_the_others_two_modules_later(here: Any) -> None:
    first, second, third = partial(1), partial(10), partial(0.5)
    assert boundary(first, [], keep=1, own_first=True) == 101
    assert boundary(second, [first], keep=2, own_joined=True, own_first=True) == 110
    assert boundary(third, [first, second], keep=2, own_joined=True, own_first=True) == 101.5
    # A standard layer waits for all; its own module joins whole.
    assert boundary(partial(3), [second, third], own_joined=True) == 100 + 10 + 0.5 + 6
    assert not here.in_flight


def test_a_post_norm_sees_the_reduced_output(here: Any) -> None:
    first, second = partial(1), partial(10)
    weights = [torch.full((4,), 5.0), torch.full((4,), 7.0)]
    assert boundary(first, [], keep=1, after=weights[:1]) == 100
    assert boundary(second, [first], after=weights) == pytest.approx(100 + 5 + 7)


def test_what_arrives_from_another_stage_is_added_as_it_is(here: Any) -> None:
    weights = [torch.full((4,), 7.0)]  # of this stage's module alone
    assert boundary(partial(10), [partial(3)], arrived=True, after=weights) == pytest.approx(100 + 3 + 7)


@pytest.mark.parametrize("arrived", [False, True])
def test_all_reduces_left_by_a_failed_pass_are_forgotten(here: Any, arrived: bool) -> None:
    """Also by a stage that receives: its first boundary has something to add, but nothing in flight."""
    here.start(partial(1000), next_is_attention=False)
    received = [partial(3)] if arrived else []
    new = partial(1)
    boundary(new, received, keep=1, arrived=arrived)
    assert boundary(partial(10), [new], keep=1) == 102
    assert len(here.in_flight) == 1


@pytest.mark.parametrize(("piecewise", "next_is_attention"), [(True, True), (True, False), (False, True)])
def test_a_piecewise_cuda_graph_ends_with_no_all_reduce_in_flight(
    monkeypatch: pytest.MonkeyPatch, here: Any, piecewise: bool, next_is_attention: bool
) -> None:
    """Streams cannot be played here; the order in which all-reduces are issued and joined can. One that would not be hidden is in line,
    after those in flight."""
    here.cuda, here.in_line = True, InLine(here.reducer.events)
    monkeypatch.setattr(module, "_in_piecewise_graph", lambda: piecewise)
    here.start(partial(1), next_is_attention=False)
    here.start(partial(10), next_is_attention=next_is_attention)
    in_line = piecewise and next_is_attention
    assert here.reducer.events == (["issue", "join", "in line"] if in_line else ["issue", "issue"])
    assert [here.wait_for_oldest()[0, 0], here.wait_for_oldest()[0, 0]] == [2, 20]
    assert here.reducer.events.count("join") == (1 if in_line else 2)  # each once


@pytest.mark.parametrize(("own_first", "post_norm"), [(False, False), (False, True), (True, False)])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_one_kernel_does_what_torch_does_op_by_op(
    monkeypatch: pytest.MonkeyPatch, here: Any, own_first: bool, post_norm: bool, offset: float
) -> None:
    """What CUDA runs, on Triton's interpreter: a chain of boundaries that begins, keeps two in flight and ends."""
    from lab.triton_interpreter import mend_interpreter

    monkeypatch.setenv("TRITON_INTERPRET", "1")  # as when the kernels were defined (conftest.py)
    mend_interpreter()
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    hidden = 96
    partials, first, weight, norm = [random(3, hidden) for _ in range(5)], random(3, hidden), random(hidden), random(hidden)

    def chain() -> list[Tensor]:
        stream, in_flight, found = first, list[Tensor](), list[Tensor]()
        for new, keep in zip(partials, (1, 2, 2, 1, 0), strict=True):
            if keep > len(in_flight) and not own_first:
                found.append(torch.ops.ladder_residual.begin(new, in_flight, stream, weight, EPSILON, offset, False, True))
            else:
                after = [norm] * (len(in_flight) + 1) if post_norm else []
                flags = (keep, False, own_first and bool(in_flight), own_first, True)
                arguments = (new, in_flight, stream, weight, EPSILON, offset, after, *flags)
                x, stream = torch.ops.ladder_residual.boundary(*arguments)
                found += [x, stream]
            in_flight = [*in_flight, new][-keep:] if keep else []
        return found

    slowly = chain()
    monkeypatch.setattr(ops, "norm_slowly", ops.norm_in_one_kernel)
    at_once = chain()
    for one, other in zip(at_once, slowly, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_shapes_are_known_without_running(here: Any) -> None:
    """What a compiler sees."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        new, weight = torch.empty(2, 4), torch.empty(4)
        x = torch.ops.ladder_residual.begin(new, [], new, weight, EPSILON, 0.0, False, True)
        one, stream = torch.ops.ladder_residual.boundary(new, [new], x, weight, EPSILON, 0.0, [], 1, False, False, False, True)
        latest, last = torch.ops.ladder_residual.drain(new, [new], stream, EPSILON, 0.0, [], False, False)
    assert {each.shape for each in (x, one, stream, latest, last)} == {(2, 4)}
    assert not here.reducer.events
