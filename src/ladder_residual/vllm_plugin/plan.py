"""What happens between two modules of the chain, for every wiring: read off ``core/dependencies.py``.

Inside vLLM's compiled models only tensors may travel from layer to layer. So the plan is made once, when a model is built, and the
layers follow it.
"""

from __future__ import annotations

from typing import NamedTuple

from ..core.config import Wiring
from ..core.dependencies import LOCAL as ONLY_LOCAL
from ..core.dependencies import dependencies

# How a module's partial enters the stream.
REDUCED = "reduced"  # over the ranks
OWN_FIRST = "own first"  # this rank's partial at once, those of the others when they are reduced (delayed)
LOCAL = "local"  # this rank's partial alone
AVERAGED = "averaged"  # reduced, in one all-reduce with the mean of the ranks' streams
WITH_NEXT = "with next"  # not by itself: it is added to the next module's partial (parallel)


class Boundary(NamedTuple):
    """From a module's partial to what the next module reads.

    ``in_flight``: how many all-reduces, the latest ones, are in flight while the next module computes. ``average_streams``: the
    diverged streams are averaged before the next module.
    """

    joins: str
    in_flight: int
    average_streams: bool = False


def boundaries(wiring: Wiring) -> list[Boundary]:
    """One per module (attention and MLP of each layer in turn): how the stream goes from it to the next, or to the end. ValueError if a
    module joins in a way the layers here have no place for."""
    chain = dependencies(wiring)
    plan = []
    for output, read_next in enumerate(chain.reads[1:], start=1):
        started = [each for each in chain.all_reduces if each.started_after == output]
        joins = {AVERAGED if each.has_stream else REDUCED for each in started if each.has_output}
        average = any(not each.has_output for each in started)
        if average or read_next.get(output) == ONLY_LOCAL:
            joins.add(LOCAL)
        if joins == {REDUCED, LOCAL}:
            joins = {OWN_FIRST}
        elif not joins and output not in read_next:
            joins = {WITH_NEXT}
        if len(joins) != 1:
            raise ValueError(f"wiring {wiring.spec} is not served with vLLM")
        in_flight = sum(each.started_after <= output and each.waited_before > output + 1 for each in chain.all_reduces)
        plan.append(Boundary(joins.pop(), in_flight, average))
    return plan


def on_one_rank(boundary: Boundary) -> Boundary:
    """There a partial is reduced already: all ways to join are the same, and only a ladder reads an older stream."""
    if boundary.joins == WITH_NEXT:
        return boundary
    return Boundary(REDUCED, boundary.in_flight if boundary.joins == REDUCED else 0)


def can_run_in_line(plan: list[Boundary]) -> bool:
    """Whether every module's output joins as a whole: then it may be reduced at once, and join when its turn comes."""
    return all(boundary.joins == REDUCED for boundary in plan)
