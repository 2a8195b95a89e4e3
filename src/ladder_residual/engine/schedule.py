"""The order of work of one decode step, as data: what each module reads, what is all-reduced, on which chain it runs.

    >>> plan = plan_steps(Wiring.parse("ladder", num_layers=2), "serial")
    >>> [(step.name, step.adds) for step in plan.steps]
    [('attention 0', (0,)), ('mlp 0', ()), ('attention 1', (1,)), ('mlp 1', (2,))]

Outputs are numbered along the chain of modules: 0 is the embedding, 1 the attention of layer 0, 2 its MLP, and so on. Before a module
runs, its step *adds* outputs to the residual stream. Which ones a module may read comes from ``core.dependencies``, which runs the
wiring's own recurrence.

``serial``       one chain. All-reduces still run beside it where the wiring lets the next module start without them.
``two_stream``   the attention chain and the MLP chain run at the same time, each with its own copy of the residual stream.
``interleaved``  one chain of three kernels a layer: QKV, gate/up, down. Attention and its output projection run beside gate/up. With a
                 ladder wiring only MLPs store the residual stream, so that no kernel but down reads what the kernel before it wrote.

Nothing here touches a device: ``executor.py`` runs a plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import pairwise

from ..core.config import Wiring
from ..core.dependencies import REDUCED, AllReduce, Share, dependencies

MAX_ADDS = 3  # outputs one kernel can add; the widest case is a standard layer after a ladder layer with two chains
SCHEDULES = ("serial", "two_stream", "interleaved")
SUPPORTED_KINDS = ("standard", "ladder", "parallel", "desync", "delayed", "no-comm")
MAX_DELAY = 4  # modules; the executor's ring of buffers holds the outputs in flight


@dataclass(frozen=True)
class Step:
    """One module and what happens around it. ``kind == "average"``: no module, but the mean of the ranks' diverged streams;
    ``kind == "join"``: no module either, the stream takes up more outputs than one kernel can add."""

    kind: str  # attention | mlp | average | join | head
    layer: int
    output: int  # the number of the output it computes
    adds: tuple[int, ...]  # outputs to add to the residual stream before it is read, oldest first
    adds_own: tuple[int, ...] = ()  # delayed: outputs of which this rank's own partial joins the stream, not yet reduced
    reduces_others: bool = False  # delayed: what arrives is the sum of the other ranks' partials
    keeps_stream: bool = True  # False: the stream starts anew from ``adds`` (the embedding, or the mean of diverged streams)
    reduce: bool = True  # all-reduce the output
    partial_adds_stream: bool = False  # desync: what is all-reduced is the partial + stream / tp
    partial_adds_output: int | None = None  # parallel: the attention partial that is all-reduced with the MLP's
    uses_input_norm: bool = False  # parallel: the MLP reads through the layer's input norm
    chain: int = 0  # with two chains 0 is attention's and 1 the MLP's
    read_only: bool = False  # the stream with ``adds`` is read and not stored: a later step adds them again, or none does

    @property
    def name(self) -> str:
        return f"{self.kind} {self.layer}"

    @property
    def reads(self) -> tuple[int, ...]:
        """Every output it adds, reduced or not."""
        return (*self.adds, *self.adds_own)

    @property
    def stores_stream(self) -> bool:
        return bool(self.reads) and not self.read_only


@dataclass(frozen=True)
class Plan:
    wiring: Wiring
    num_chains: int
    steps: tuple[Step, ...]
    head: Step  # what the LM head reads; computes no output
    interleaved: bool = False

    @property
    def schedule(self) -> str:
        """The schedule that is run: ``serial`` where there is nothing to interleave."""
        return "two_stream" if self.num_chains == 2 else "interleaved" if self._beside_mlp else "serial"

    def consumers(self, output: int) -> Sequence[Step]:
        return self._consumers.get(output, ())

    def overlaps(self, step: Step) -> bool:
        """Whether the next step of its chain runs while this step's all-reduce is in flight."""
        return step.output in self._overlapped

    def runs_beside_mlp(self, step: Step) -> bool:
        """Whether an attention, but for its QKV projection, runs beside the MLP's gate/up projection."""
        return step.output in self._beside_mlp

    @cached_property
    def can_read_before_wait(self) -> bool:
        """Whether no QKV and no gate/up kernel reads an output or a stream that the kernel before it on the chain wrote (an MLP's stream
        is written by gate/up, two kernels before the next QKV). True for an interleaved step of ladder layers alone."""
        apart = all(
            before.output not in step.reads and (before.read_only or before.kind == "mlp")
            for before, step in pairwise(self.steps)
        )
        return apart and self.num_chains == 1 and len(self._beside_mlp) == self.wiring.num_layers

    # Looked up for every step of every prompt while the GPU waits, so computed once.
    @cached_property
    def _beside_mlp(self) -> frozenset[int]:
        pairs = pairwise(self.steps) if self.interleaved else ()
        layers = (pair for pair in pairs if (pair[0].kind, pair[1].kind) == ("attention", "mlp"))
        return frozenset(attention.output for attention, mlp in layers if attention.output not in mlp.reads)

    @cached_property
    def _consumers(self) -> dict[int, list[Step]]:
        found: dict[int, list[Step]] = {}
        for step in (*self.steps, self.head):
            for output in step.reads:
                found.setdefault(output, []).append(step)
        return found

    @cached_property
    def _overlapped(self) -> frozenset[int]:
        chains = [[step for step in (*self.steps, self.head) if step.chain == chain] for chain in range(self.num_chains)]
        neighbours = [pair for steps in chains for pair in pairwise(steps)]
        return frozenset(step.output for step, following in neighbours if step.output not in following.adds)


@cache
def plan_steps(wiring: Wiring, schedule: str = "serial") -> Plan:
    if wiring.kind not in SUPPORTED_KINDS:
        raise ValueError(f"the CUDA engine has no {wiring.name} wiring; it runs {', '.join(SUPPORTED_KINDS)}")
    if schedule not in SCHEDULES:
        raise ValueError(f"unknown schedule {schedule!r}; choose from auto, {', '.join(SCHEDULES)}")
    if wiring.kind == "delayed" and wiring.step > MAX_DELAY:
        raise ValueError(f"the CUDA engine runs delayed-1 to delayed-{MAX_DELAY}, not {wiring.spec}: use --engine torch")
    if schedule == "two_stream":
        if wiring.kind not in ("ladder", "standard"):
            raise ValueError(f"two_stream needs a ladder wiring, {wiring.spec} has one chain: use serial")
        return _plan_two_stream(wiring)
    if schedule == "interleaved" and wiring.kind == "ladder":
        return _plan_interleaved(wiring)
    serial = _plan_delayed if wiring.kind == "delayed" else _plan_serial
    return replace(serial(wiring), interleaved=schedule == "interleaved")


def available_schedules(wiring: Wiring) -> tuple[str, ...]:
    """Those that differ from ``serial``, and it: two chains exist only where some layers are ladder layers, and an MLP that does not wait
    for its layer's attention there and in parallel layers."""
    if wiring.kind == "ladder":
        return SCHEDULES
    return ("serial", "interleaved") if wiring.kind == "parallel" else ("serial",)


def _plan_serial(wiring: Wiring) -> Plan:
    known = dependencies(wiring)
    started: dict[int, list[AllReduce]] = {}  # by the output computed last before
    for all_reduce in known.all_reduces:
        started.setdefault(all_reduce.started_after, []).append(all_reduce)
    last = 2 * wiring.num_layers
    average = last  # numbers of the outputs of "average" steps go on from here
    waiting: dict[int, set[int]] = {0: {0}}  # outputs not yet in the stream, and what each is made of
    steps: list[Step] = []
    keeps = False

    def take(readable: set[int]) -> tuple[tuple[int, ...], bool]:
        """The outputs to add, and whether to the stream there is."""
        nonlocal keeps
        adds, kept = tuple(number for number, parts in waiting.items() if parts <= readable), keeps
        for number in adds:
            del waiting[number]
        keeps = keeps or bool(adds)
        return adds, kept

    for output in range(1, last + 2):
        layer, is_mlp = divmod(output - 1, 2)
        for all_reduce in started.get(output - 1, ()):
            if not all_reduce.has_output:  # diverged streams become one before this module
                average += 1
                adds, kept = take(set(all_reduce.shares))
                steps.append(Step("average", layer, average, adds, keeps_stream=kept))
                waiting, keeps = {average: set(all_reduce.shares)}, False
        adds, kept = take(set(known.reads[output - 1]))
        if output > last:
            head = Step("head", wiring.num_layers, -1, adds, keeps_stream=kept, reduce=False, read_only=True)
            return Plan(wiring, 1, tuple(steps), head)
        own = next((all_reduce for all_reduce in started.get(output, ()) if all_reduce.has_output), None)
        step = Step("mlp" if is_mlp else "attention", layer, output, adds, keeps_stream=kept, reduce=own is not None)
        parts = {output}
        if own is not None and own.has_stream:
            step = replace(step, partial_adds_stream=True)
            parts, waiting, keeps = set(own.shares), {}, False
        elif wiring.kind_of(layer) == "parallel":
            if is_mlp:
                step = replace(step, partial_adds_output=output - 1, uses_input_norm=True)
            parts = {output - 1, output} if is_mlp else set()
        steps.append(step)
        if parts:
            waiting[output] = parts
    raise AssertionError("the loop ends with the head")


def _plan_delayed(wiring: Wiring) -> Plan:
    """A rank's own partial joins its stream at once, those of the others when their all-reduce is waited for."""
    joined: dict[int, Share] = {}
    steps: list[Step] = []
    for output, readable in enumerate(dependencies(wiring).reads, start=1):
        layer, is_mlp = divmod(output - 1, 2)
        own = tuple(number for number in readable if number not in joined and _is_delayed(wiring, number))
        arrived = tuple(number for number in readable if joined.get(number) != readable[number] == REDUCED)
        joined |= readable
        pending = [(number, False) for number in arrived] + [(number, True) for number in own]
        while len(pending) > MAX_ADDS:
            due, mine = _adds(pending[:MAX_ADDS])
            steps.append(Step("join", layer, -1, due, mine, keeps_stream=output > 1, reduce=False))
            pending = pending[MAX_ADDS:]
        kind = "head" if layer == wiring.num_layers else "mlp" if is_mlp else "attention"
        due, mine = _adds(pending)
        step = Step(kind, layer, output, due, mine, reduces_others=_is_delayed(wiring, output), keeps_stream=output > 1)
        if kind == "head":
            return Plan(wiring, 1, tuple(steps), replace(step, output=-1, reduce=False, read_only=True, reduces_others=False))
        steps.append(step)
    raise AssertionError("the loop ends with the head")


def _is_delayed(wiring: Wiring, output: int) -> bool:
    return 0 < output <= 2 * wiring.num_layers and wiring.kind_of((output - 1) // 2) == "delayed"


def _adds(pending: Sequence[tuple[int, bool]]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """``Step.adds`` and ``Step.adds_own`` of pairs: an output, and whether only this rank's own part of it joins."""
    return tuple(number for number, own in pending if not own), tuple(number for number, own in pending if own)


def _plan_two_stream(wiring: Wiring) -> Plan:
    """Chain 0 has the attentions, chain 1 the MLPs and the head."""
    reads = dependencies(wiring).reads
    newest_in = [-1, -1]  # the newest output in each chain's stream
    steps: list[Step] = []

    def take(chain: int, newest: int) -> tuple[tuple[int, ...], bool]:
        adds, kept = tuple(range(newest_in[chain] + 1, newest + 1)), newest_in[chain] >= 0
        newest_in[chain] = max(newest, newest_in[chain])
        return adds, kept

    for output, readable in enumerate(reads[:-1], start=1):
        layer, chain = divmod(output - 1, 2)
        adds, kept = take(chain, max(readable))
        steps.append(Step(("attention", "mlp")[chain], layer, output, adds, keeps_stream=kept, chain=chain))
    adds, kept = take(1, max(reads[-1]))
    head = Step("head", wiring.num_layers, -1, adds, keeps_stream=kept, reduce=False, chain=1, read_only=True)
    return Plan(wiring, 2, tuple(steps), head)


def _plan_interleaved(wiring: Wiring) -> Plan:
    """Only MLPs store the stream. An attention reads it with the outputs it may see on top, and its MLP adds those again."""
    reads = dependencies(wiring).reads
    stored = -1  # the newest output in the stream
    steps: list[Step] = []
    for output, readable in enumerate(reads[:-1], start=1):
        layer, is_mlp = divmod(output - 1, 2)
        adds = tuple(range(stored + 1, max(readable) + 1))
        kind = "mlp" if is_mlp else "attention"
        steps.append(Step(kind, layer, output, adds, keeps_stream=stored >= 0, read_only=not is_mlp))
        if is_mlp:
            stored = max(readable)
    adds = tuple(range(stored + 1, max(reads[-1]) + 1))
    head = Step("head", wiring.num_layers, -1, adds, reduce=False, read_only=True)
    return Plan(wiring, 1, tuple(steps), head, interleaved=True)
