"""The residual wirings, side by side.

A decoder is a chain of modules h_1, h_2, ... (attention, MLP, attention, MLP, ...), each with its pre-norm inside. x_0 is the
embedding, AR the all-reduce of the partials that the ranks compute.

    standard    x_i = x_{i-1} + AR(h_i(x_{i-1}))
    ladder      x_i = x_{i-1} + AR(h_i(x_{i-2})),  x_{-1} = x_0
    parallel    x_l = x_{l-1} + AR(attn(x_{l-1}) + mlp(x_{l-1})),  one norm for both
    desync-N    x  += partial, no AR; every N-th module x = AR(partial + x / ranks)
    delayed-d   x  += partial at once; what the other ranks add arrives d modules later
    no-comm     x  += partial, never an AR: wrong on purpose, the upper bound of any speed-up

Each function takes one layer's step: ``ladder(state, modules, reducer) -> state``, with ``modules`` the layer's residual branches
in order, for a decoder ``(attn, mlp)``. A module maps the stream to this rank's *partial*; the wiring alone decides when an
all-reduce starts and when it is waited for. What a layer leaves in flight travels in the ``State`` to the next one, so any mixture of
standard and ladder layers follows the recurrence across its borders: a standard module first waits for everything in flight, a
ladder module leaves the most recent all-reduce in flight while it computes.

Nothing here imports torch: ``dependencies.py`` runs these functions on symbols, for the planner too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from operator import add
from typing import TYPE_CHECKING, NamedTuple

from .config import Wiring

if TYPE_CHECKING:
    from torch import Tensor

    from .reduce import Pending, Reducer


class Branch(NamedTuple):
    """A module of the chain. ``partial`` maps the stream to this rank's part; ``after`` is applied to the reduced output (post-norms)."""

    partial: Callable[[Tensor], Tensor]
    after: Callable[[Tensor], Tensor] | None = None

    def __call__(self, x: Tensor) -> Tensor:
        return self.partial(x)


class State(NamedTuple):
    """What one layer hands to the next: the stream, and the all-reduces not yet added to it (oldest first)."""

    stream: Tensor
    pending: tuple[Pending, ...] = ()
    diverged: bool = False  # the ranks' streams differ (desync between two all-reduces)


def wait_pending(state: State, keep: int = 0) -> State:
    """Wait for all but the ``keep`` most recent all-reduces and add them to the stream."""
    due = len(state.pending) - keep
    if due <= 0:
        return state
    stream = state.stream
    for pending in state.pending[:due]:
        stream = stream + pending.wait()
    return state._replace(stream=stream, pending=state.pending[due:])


def average_streams(state: State, reducer: Reducer) -> State:
    """Wait for everything in flight, and replace diverged streams by their mean."""
    state = wait_pending(state)
    if not state.diverged:
        return state
    return State(reducer.start(state.stream / reducer.size).wait())


def _read_and_start(state: State, module: Branch, reducer: Reducer, keep: int) -> State:
    if state.diverged:
        state = average_streams(state, reducer)
    state = wait_pending(state, keep)
    pending = reducer.start(module(state.stream))._replace(after=module.after)
    return state._replace(pending=(*state.pending, pending))


def standard(state: State, modules: Sequence[Branch], reducer: Reducer) -> State:
    for module in modules:
        state = _read_and_start(state, module, reducer, keep=0)
    return state


def ladder(state: State, modules: Sequence[Branch], reducer: Reducer) -> State:
    for module in modules:
        state = _read_and_start(state, module, reducer, keep=1)
    return state


def annealed(state: State, modules: Sequence[Branch], reducer: Reducer, *, switched: Tensor) -> State:
    """On the way from standard (``switched`` 0) to ladder (1): modules read x_{i-2} + (1 - switched) (x_{i-1} - x_{i-2}). For training:
    nothing is hidden, as the newest all-reduce is waited for."""
    for module in modules:
        state = wait_pending(average_streams(state, reducer) if state.diverged else state, keep=1)
        read = state.stream
        if state.pending:
            newest = state.pending[0].wait()
            read = read + (1 - switched) * newest
            state = state._replace(pending=(reducer.arrived(newest),))
        pending = reducer.start(module(read))._replace(after=module.after)
        state = state._replace(pending=(*state.pending, pending))
    return state


def parallel(state: State, modules: Sequence[Branch], reducer: Reducer) -> State:
    together = Branch(lambda x: reduce(add, (module(x) for module in modules)))
    return _read_and_start(state, together, reducer, keep=0)


def desync(state: State, modules: Sequence[Branch], reducer: Reducer, *, every: int, modules_before: int) -> State:
    """``modules_before`` counts the modules of the layers below, so that all-reduces are ``every`` modules apart across layers."""
    state = wait_pending(state)
    for index, module in enumerate(modules, start=modules_before + 1):
        partial = module(state.stream)
        if index % every == 0:
            state = State(reducer.start(partial + state.stream / reducer.size).wait())
        else:
            state = State(state.stream + partial, diverged=True)
    return state


def delayed(state: State, modules: Sequence[Branch], reducer: Reducer, *, delay: int) -> State:
    for module in modules:
        # An all-reduce without `own` comes from a standard layer: nothing of it was added yet, so it cannot stay in flight.
        state = wait_pending(state, keep=delay if all(p.own is not None for p in state.pending) else 0)
        partial = module(state.stream)
        others = reducer.start(partial)._replace(own=partial)
        state = state._replace(stream=state.stream + partial, pending=(*state.pending, others))
    return state


def no_comm(state: State, modules: Sequence[Branch], reducer: Reducer) -> State:
    stream = wait_pending(state).stream
    for module in modules:
        stream = stream + module(stream)
    return State(stream)


def step(
    wiring: Wiring, layer: int, state: State, modules: Sequence[Branch], reducer: Reducer, switched: Tensor | None = None
) -> State:
    """One layer of ``wiring``; all layers below have as many modules as this one. ``switched``: how far a ladder is ``annealed``;
    None: it is one."""
    match wiring.kind_of(layer):
        case "standard":
            return standard(state, modules, reducer)
        case "ladder" if switched is not None:
            return annealed(state, modules, reducer, switched=switched)
        case "ladder":
            return ladder(state, modules, reducer)
        case "parallel":
            return parallel(state, modules, reducer)
        case "desync":
            return desync(state, modules, reducer, every=wiring.step, modules_before=layer * len(modules))
        case "delayed":
            return delayed(state, modules, reducer, delay=wiring.step)
        case "no-comm":
            return no_comm(state, modules, reducer)
        case kind:
            raise AssertionError(f"config.py knows a wiring that has no function here: {kind}")


def finalize(state: State, reducer: Reducer) -> Tensor:
    """The stream after the last layer, nothing left in flight."""
    return average_streams(state, reducer).stream
