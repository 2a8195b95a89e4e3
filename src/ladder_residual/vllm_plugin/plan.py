"""What happens between two modules of the chain, for every wiring: read off the shared functions of ``wiring.py``.

Inside vLLM's compiled models nothing may travel from layer to layer but tensors. So ``wiring.step`` is run once, when a model is
built, on symbols instead of tensors; the order in which it reads the stream, starts sums and waits for them is the plan that the
layers then follow.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

from torch import Tensor

from ..config import Wiring
from ..reduce import Pending, Reducer, _Ticket
from ..wiring import Branch, State, flush, step

SUM, OWN, MEAN = "sum", "own", "mean"


class Boundary(NamedTuple):
    """From a module's partial to what the next module reads.

    ``join``: how the partial enters the stream: as the ``sum`` over ranks; only this rank's ``own``; or as ``mean``, where the
    ranks' streams, diverged before, become one again. ``keep``: how many sums (none or the latest) stay in flight while the
    next module computes. ``agree``: the diverged streams are averaged before the next module.
    """

    join: str
    keep: int
    agree: bool = False


class _Symbol:
    """A value of the dry run. What is done with it is written to ``log``."""

    def __init__(self, log: list[str], what: str) -> None:
        self.log, self.what = log, what

    def __add__(self, other: _Symbol) -> _Symbol:
        if self.what == "partial" and other.what == "share":
            return _Symbol(self.log, MEAN)
        assert self.what == "stream"
        self.log.append("settle" if other.what == "total" else OWN)
        return _Symbol(self.log, "stream")

    def __truediv__(self, ranks: int) -> _Symbol:
        return _Symbol(self.log, "share")


class _DryReducer(Reducer):
    size = 2  # any number above one

    def __init__(self, log: list[str]) -> None:
        self.log = log

    def start(self, partial: Any) -> Pending:
        names = {"partial": SUM, MEAN: MEAN, "share": "agree"}
        self.log.append(names[partial.what])
        after = "total" if partial.what == "partial" else "stream"
        return Pending(cast(Tensor, _Symbol(self.log, after)), _Ticket(self))

    def finish(self, pending: Pending) -> Tensor:
        return pending.place


def boundaries(wiring: Wiring) -> list[Boundary]:
    """One per module (attention and MLP of each layer in turn): how the stream goes from it to the next, or to the end."""
    log: list[str] = []
    segments: list[list[str]] = []

    def read(_: Any) -> Any:
        segments.append(log.copy())
        log.clear()
        return _Symbol(log, "partial")

    reducer = _DryReducer(log)
    state = State(cast(Tensor, _Symbol(log, "stream")))
    for layer in range(wiring.num_layers):
        state = step(wiring, layer, state, (Branch(read), Branch(read)), reducer)
    flush(state, reducer)
    segments.append(log.copy())

    plan, in_flight = [], 0
    for segment in segments[1:]:
        joins = [event for event in segment if event in (SUM, OWN, MEAN)]
        assert len(joins) == 1, f"{wiring.spec}: a module's output joins the stream {len(joins)} times: {segment}"
        in_flight += joins[0] == SUM
        in_flight -= segment.count("settle")
        assert in_flight in (0, 1), f"{wiring.spec} leaves {in_flight} sums in flight; the models here carry one"
        plan.append(Boundary(joins[0], in_flight, "agree" in segment))
    return plan
