"""The order of work of one decode step, as data: who reads which version of the stream, what is summed, in which lane.

    >>> plan = plan_steps(Wiring.parse("ladder", num_layers=2), "one")
    >>> [(step.name, step.absorbs) for step in plan.steps]
    [('attention 0', (0,)), ('mlp 0', ()), ('attention 1', (1,)), ('mlp 1', (2,))]

Outputs are numbered: 0 is the embedding, i the i-th module of the chain (attention, MLP, attention, ...), as in the recurrence
x_i = x_{i-1} + AR(h_i(.)). A step *absorbs* outputs into its lane's copy of the stream before it reads it. With two lanes the
attention chain and the MLP chain each keep their own copy and exchange outputs only, so that they can run at the same time.
*Woven* is one lane of three products a layer, QKV, gate/up and down; attention over the cache and its output product run beside
gate/up. Of ladder wirings only MLPs add to the stream there, so that in ladder layers no product but down reads what the one before
it wrote. Nothing here touches a device: ``execute.py`` runs a plan, tests run it on the CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import pairwise

from ..config import Wiring

MAX_ABSORBS = 3  # what one kernel adds in a go; the widest case is a standard layer after a ladder layer in two lanes
SCHEDULES = ("one", "two", "woven")
SUPPORTED_KINDS = ("standard", "ladder", "parallel", "desync", "no-comm")


@dataclass(frozen=True)
class Step:
    """One module (or, ``kind == "agree"``, the mean of diverged streams) and what happens around it."""

    kind: str  # attention | mlp | agree
    layer: int
    output: int  # the number of the output it makes
    absorbs: tuple[int, ...]  # outputs to add to the lane's stream first, oldest first
    keeps_stream: bool = True  # False: the stream starts anew from what is absorbed: the embedding, or a sync of desync
    reduce: bool = True  # sum the output over ranks
    adds_stream: bool = False  # desync's sync point: the message is partial + stream / ranks
    adds_output: int | None = None  # parallel: this rank's attention partial joins the MLP's message
    first_norm: bool = False  # parallel: the MLP reads through the layer's first norm
    lane: int = 0
    # the stream with the outputs added is read and not kept: a later step of the lane absorbs them again, or there is none
    aside: bool = False

    @property
    def name(self) -> str:
        return f"{self.kind} {self.layer}"

    @property
    def stores_stream(self) -> bool:
        return bool(self.absorbs) and not self.aside


@dataclass(frozen=True)
class Plan:
    wiring: Wiring
    lanes: int
    steps: tuple[Step, ...]
    final: Step  # what the head absorbs (kind "head", makes no output)
    woven: bool = False

    @property
    def schedule(self) -> str:
        """What is run: one lane where there was nothing to weave."""
        return "two" if self.lanes == 2 else "woven" if self._woven else "one"

    @property
    def sums(self) -> int:
        """All-reduces per step, without the embedding's and the head's."""
        return sum(step.reduce for step in self.steps)

    def consumers(self, output: int) -> Sequence[Step]:
        return self._consumers.get(output, ())

    def in_flight(self, step: Step) -> bool:
        """Whether other work of the same lane may run while this step's sum is under way."""
        return step.output in self._overlapped

    def weaves(self, step: Step) -> bool:
        """Whether an attention, but for its QKV product, may run beside the MLP's first product."""
        return step.output in self._woven

    @cached_property
    def skips(self) -> bool:
        """Whether no QKV and no gate/up reads what the product before it in the line made, nor a stream that it wrote (an MLP's is
        gate/up's, which is in front of down): a woven step of ladder layers alone."""
        apart = all(
            before.output not in step.absorbs and (before.aside or before.kind == "mlp")
            for before, step in pairwise(self.steps)
        )
        return apart and self.lanes == 1 and len(self._woven) == self.wiring.num_layers

    # Looked up for every step of every prompt, while the card waits: worked out once.
    @cached_property
    def _woven(self) -> frozenset[int]:
        pairs = pairwise(self.steps) if self.woven else ()
        apart = (pair for pair in pairs if (pair[0].kind, pair[1].kind) == ("attention", "mlp"))
        return frozenset(step.output for step, mlp in apart if step.output not in mlp.absorbs)

    @cached_property
    def _consumers(self) -> dict[int, list[Step]]:
        found: dict[int, list[Step]] = {}
        for step in (*self.steps, self.final):
            for output in step.absorbs:
                found.setdefault(output, []).append(step)
        return found

    @cached_property
    def _overlapped(self) -> frozenset[int]:
        by_lane = [[step for step in (*self.steps, self.final) if step.lane == lane] for lane in range(self.lanes)]
        neighbours = [pair for steps in by_lane for pair in pairwise(steps)]
        return frozenset(step.output for step, following in neighbours if step.output not in following.absorbs)


@cache
def plan_steps(wiring: Wiring, schedule: str = "one") -> Plan:
    if wiring.kind not in SUPPORTED_KINDS:
        raise ValueError(f"the CUDA engine has no {wiring.name} wiring; it runs {', '.join(SUPPORTED_KINDS)}")
    if schedule not in SCHEDULES:
        raise ValueError(f"unknown schedule {schedule!r}; choose from auto, {', '.join(SCHEDULES)}")
    if schedule == "two":
        if wiring.kind not in ("ladder", "standard"):
            raise ValueError(f"two lanes need a ladder wiring, {wiring.spec} has one chain: use one lane")
        return _plan_two_lanes(wiring)
    if schedule == "woven" and wiring.kind == "ladder":
        return _plan_woven(wiring)
    return replace(_plan_one_lane(wiring), woven=schedule == "woven")


def _plan_one_lane(wiring: Wiring) -> Plan:
    steps: list[Step] = []
    pending: list[int] = [0]
    keeps = False  # the embedding replaces the (empty) stream
    diverged = False
    extra = 2 * wiring.num_layers  # numbers for the outputs of "agree" steps

    def absorb(most_recent_kept: int) -> tuple[tuple[int, ...], bool]:
        """Take all pending outputs but the ``most_recent_kept`` newest."""
        nonlocal pending, keeps
        # x_{-1} = x_0: the embedding is never left behind
        due = len(pending) - most_recent_kept if pending != [0] else 1
        taken, pending = tuple(pending[: max(due, 0)]), pending[max(due, 0) :]
        keep = keeps
        if taken:
            keeps = True
        return taken, keep

    def agree(layer: int) -> None:
        nonlocal pending, keeps, diverged, extra
        if not diverged:
            return
        extra += 1
        taken, keep = absorb(0)
        steps.append(Step("agree", layer, extra, taken, keeps_stream=keep))
        pending, keeps, diverged = [extra], False, False

    for layer in range(wiring.num_layers):
        kind = wiring.kind_of(layer)
        attention, mlp = 2 * layer + 1, 2 * layer + 2
        if kind not in ("desync", "no-comm"):
            agree(layer)
        if kind == "parallel":
            taken, keep = absorb(0)
            steps.append(Step("attention", layer, attention, taken, keeps_stream=keep, reduce=False))
            steps.append(Step("mlp", layer, mlp, (), adds_output=attention, first_norm=True))
            pending.append(mlp)
            continue
        for name, output in (("attention", attention), ("mlp", mlp)):
            taken, keep = absorb(1 if kind == "ladder" else 0)
            if kind == "desync" and output % wiring.step == 0:
                steps.append(Step(name, layer, output, taken, keeps_stream=keep, adds_stream=True))
                keeps, diverged = False, False
            else:
                reduce = kind not in ("desync", "no-comm")
                steps.append(Step(name, layer, output, taken, keeps_stream=keep, reduce=reduce))
                diverged = diverged or kind == "desync"
            pending.append(output)
    agree(wiring.num_layers)
    taken, keep = absorb(0)
    final = Step("head", wiring.num_layers, -1, taken, keeps_stream=keep, reduce=False, aside=True)
    return Plan(wiring, 1, tuple(steps), final)


def _plan_two_lanes(wiring: Wiring) -> Plan:
    """Lane 0 has the attention chain, lane 1 the MLP chain; each absorbs what the recurrence lets it see, no more."""
    absorbed = [-1, -1]  # the newest output in each lane's stream
    steps: list[Step] = []

    def absorb(lane: int, newest: int) -> tuple[tuple[int, ...], bool]:
        taken = tuple(range(absorbed[lane] + 1, newest + 1))
        keep = absorbed[lane] >= 0
        absorbed[lane] = max(newest, absorbed[lane])
        return taken, keep

    for layer in range(wiring.num_layers):
        behind = 2 if wiring.kind_of(layer) == "ladder" else 1
        for lane, name in enumerate(("attention", "mlp")):
            output = 2 * layer + 1 + lane
            taken, keep = absorb(lane, max(output - behind, 0))
            steps.append(Step(name, layer, output, taken, keeps_stream=keep, lane=lane))
    taken, keep = absorb(1, 2 * wiring.num_layers)
    final = Step("head", wiring.num_layers, -1, taken, keeps_stream=keep, reduce=False, lane=1, aside=True)
    return Plan(wiring, 2, tuple(steps), final)


def _plan_woven(wiring: Wiring) -> Plan:
    """One stream, which only MLPs add to. An attention reads it with what it may see beyond; that its MLP absorbs again."""
    kept = -1  # the newest output in the stream
    steps: list[Step] = []
    for layer in range(wiring.num_layers):
        behind = 2 if wiring.kind_of(layer) == "ladder" else 1
        for kind, output in (("attention", 2 * layer + 1), ("mlp", 2 * layer + 2)):
            newest = max(output - behind, 0)
            absorbs = tuple(range(kept + 1, newest + 1))
            steps.append(Step(kind, layer, output, absorbs, keeps_stream=kept >= 0, aside=kind == "attention"))
            if kind == "mlp":
                kept = newest
    absorbs = tuple(range(kept + 1, 2 * wiring.num_layers + 1))
    final = Step("head", wiring.num_layers, -1, absorbs, reduce=False, aside=True)
    return Plan(wiring, 1, tuple(steps), final, woven=True)


def schedules_of(wiring: Wiring) -> tuple[str, ...]:
    """Those that differ from one lane: two chains exist only where some layers are ladder layers, and an MLP that does not wait for its
    layer's attention there and in parallel layers."""
    if wiring.kind == "ladder":
        return SCHEDULES
    return ("one", "woven") if wiring.kind == "parallel" else ("one",)
