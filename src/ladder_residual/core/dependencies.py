"""What each module reads and which all-reduces run while it computes, for any wiring. No torch.

The functions of ``wiring.py`` run here on symbols instead of tensors, so nothing states a recurrence a second time. Outputs are
numbered along the chain of a decoder: 0 is the embedding, 1 the attention of layer 0, 2 its MLP, 3 the attention of layer 1, ...

    >>> [all_reduce.modules_between for all_reduce in dependencies(Wiring.parse("ladder", 2)).all_reduces]
    [1, 1, 1, 0]
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, cached_property
from typing import Any, NamedTuple

from .config import Wiring
from .wiring import Branch, State, finalize, step

_RANKS = 4  # any number above one gives the same answers; shares of a power of two are exact


class Share(NamedTuple):
    """How an output stands in a value of one rank: the factors of this rank's partial and of every other rank's."""

    own: float
    others: float


LOCAL = Share(1, 0)  # this rank's partial alone
REDUCED = Share(1, 1)  # the sum of all partials


class AllReduce(NamedTuple):
    started_after: int  # the output computed last before it starts
    waited_before: int  # the output computed first after it is waited for; of the last ones: one past the last output
    value: Value  # what each rank contributes

    @property
    def modules_between(self) -> int:
        """How many modules compute while it runs."""
        return self.waited_before - self.started_after - 1

    @property
    def has_output(self) -> bool:
        """Whether it reduces the output computed before it (and not only averages the stream)."""
        return self.value.newest == self.started_after and self.value.factor == 1

    @property
    def has_stream(self) -> bool:
        """Whether it averages the streams of the ranks (desync)."""
        return self.value.has_embedding

    @property
    def shares(self) -> dict[int, Share]:
        return self.value.shares()


class Dependencies:
    """Made in a time that grows with the number of layers; ``reads`` grows with its square and is made when it is asked for."""

    def __init__(self, streams: list[Value], all_reduces: list[AllReduce]) -> None:
        self._streams = streams
        self.all_reduces = tuple(all_reduces)  # in the order of their starts; without the embedding's

    @cached_property
    def reads(self) -> tuple[Mapping[int, Share], ...]:
        """The stream that outputs 1, 2, ... are computed from; last: the stream of the head."""
        return tuple(stream.shares() for stream in self._streams)


@cache
def dependencies(wiring: Wiring) -> Dependencies:
    run = _Run()
    state = State(Value((1, True, 0)))  # type: ignore[arg-type]
    for layer in range(wiring.num_layers):
        state = step(wiring, layer, state, (Branch(run.module), Branch(run.module)), run)  # type: ignore[arg-type]
    run.module(finalize(state, run))  # type: ignore[arg-type]
    starts = enumerate(run.started)
    return Dependencies(run.streams, [AllReduce(after, run.waited_before[number], value) for number, (after, value) in starts])


class Value:
    """A linear combination of outputs, as a tree. A term is a factor, whether it is all-reduced, and a value or a module's partial."""

    __slots__ = ("factor", "has_embedding", "newest", "terms")

    newest: int  # the newest output in it
    factor: float  # of that output's partial; nobody asks for it after an all-reduce
    has_embedding: bool

    def __init__(self, *terms: tuple[float, bool, Value | int]) -> None:
        self.terms = terms
        parts = [(term, 1.0) if isinstance(term, int) else (term.newest, term.factor) for _, _, term in terms]
        self.newest = max(newest for newest, _ in parts)
        self.factor = sum(
            term[0] * factor for term, (newest, factor) in zip(terms, parts, strict=True) if newest == self.newest
        )
        self.has_embedding = any(term == 0 if isinstance(term, int) else term.has_embedding for _, _, term in terms)

    def __add__(self, other: Value) -> Value:
        return Value((1, False, self), (1, False, other))

    def __sub__(self, other: Value) -> Value:
        return Value((1, False, self), (-1, False, other))

    def __truediv__(self, ranks: int) -> Value:
        return Value((1 / ranks, False, self))

    def reduced(self) -> Value:
        return Value((1, True, self))

    def shares(self) -> dict[int, Share]:
        found: dict[int, Share] = {}
        todo: list[tuple[float, bool, Value | int]] = [(1, False, self)]
        while todo:
            factor, reduced, value = todo.pop()
            if isinstance(value, int):
                own, others = found.get(value, (0, 0))
                found[value] = Share(own + factor, others + factor * reduced)
                continue
            for term_factor, term_reduced, term in value.terms:
                again = _RANKS if reduced and term_reduced else 1  # all ranks hold the same: their sum is as many times that
                todo.append((factor * term_factor * again, reduced or term_reduced, term))
        return dict(sorted(found.items()))


class _Pending(NamedTuple):
    """Stands for ``reduce.Pending``. ``after`` is not followed: it changes no dependency."""

    result: Value
    on_wait: Callable[[], None]
    own: Value | None = None
    after: Any = None

    def wait(self) -> Value:
        self.on_wait()
        return self.result if self.own is None else self.result - self.own


class _Run:
    """Stands for a ``Reducer``, and for every module."""

    size = _RANKS

    def __init__(self) -> None:
        self.streams: list[Value] = []
        self.started: list[tuple[int, Value]] = []
        self.waited_before: dict[int, int] = {}

    def module(self, stream: Any) -> Any:
        self.streams.append(stream)
        return Value((1, False, len(self.streams)))

    def start(self, partial: Value) -> _Pending:
        number = len(self.started)
        self.started.append((len(self.streams), partial))
        return _Pending(partial.reduced(), lambda: self.waited_before.update({number: len(self.streams) + 1}))
