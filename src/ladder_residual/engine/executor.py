"""Runs a plan: which stream, which buffers, when to wait. The same code runs eagerly (prefill), under graph capture (decode)
and on the CPU (tests)."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from .lane import Lane
from .launcher import BEHIND, BEHIND_BUT_NEWEST, Launcher
from .reducers import EngineReducer
from .schedule import MAX_ABSORBS, Plan, Step
from .streams import Streams

# Messages live in a ring. In two lanes one chain can run at most two layers ahead of the other (it then needs the other's
# output), so four layers of buffers are never overwritten early. Woven, attention beside the line starts behind its layer's QKV.
RING = 8


class Ops(Protocol):
    @property
    def launchers(self) -> Sequence[Any]: ...

    @property
    def early_sums(self) -> bool:
        """Whether sums beside the line are launched before their message is there."""
        ...

    @property
    def reads_before(self) -> bool:
        """Whether its kernels may read before they wait, where the plan lets them (``Launcher.next_waits``)."""
        ...

    def embed(self, tokens: Tensor, message: Tensor) -> None: ...

    # attention: the three in this order
    def qkv(self, step: Step, lane: Lane, absorbed: Sequence[Tensor]) -> None: ...

    def attend(self, step: Step, launch: Launcher) -> None: ...

    def output(self, step: Step, launch: Launcher, lane: Lane, message: Tensor) -> None: ...

    # the MLP: these two
    def gate_up(self, step: Step, lane: Lane, absorbed: Sequence[Tensor]) -> None: ...

    def down(self, step: Step, lane: Lane, message: Tensor, other: Tensor | None) -> None: ...

    def head(self, step: Step, lane: Lane, absorbed: Sequence[Tensor], logits: Tensor) -> None: ...


class Executor:
    """Buffers for ``rows`` rows (sequences, or sequence positions) and the loop over a plan's steps."""

    def __init__(
        self, plan: Plan, ops: Ops, reducer: EngineReducer, streams: Streams, *, rows: int, hidden: int, tp: int,
        dtype: torch.dtype, device: torch.device,
    ) -> None:  # fmt: skip
        self.plan, self.ops, self.reducer, self.streams, self.tp = plan, ops, reducer, streams, tp
        self._lanes = [Lane(rows, hidden, device) for _ in range(plan.lanes)]
        self._lane_names = ["main"] if plan.lanes == 1 else ["attention", "main"]
        self._embedding = reducer.allocate(rows, hidden, dtype, device)
        self._ring = [reducer.allocate(rows, hidden, dtype, device) for _ in range(RING)]
        self._slots = {step.output: index % RING for index, step in enumerate(plan.steps)}
        self._by_output = {step.output: step for step in plan.steps}
        line = ops.launchers[0] if ops.launchers else Launcher(pdl=0)
        if plan.schedule == "woven" and line.pdl:
            # Down, let in as gate/up begins, would keep attention's programs out. And whoever reads before it waits relies on it that
            # the kernel in front of it was let in only when all before that was complete.
            line.pdl = 2
        self._sum_launchers = [Launcher(pdl=min(line.pdl, 1), carveout=line.carveout) for _ in range(2)]
        widest = max(len(step.absorbs) for step in (*plan.steps, plan.final))
        assert widest <= MAX_ABSORBS, f"a step absorbs {widest} outputs, the kernels take {MAX_ABSORBS}"

    def run(self, tokens: Tensor, logits: Tensor) -> None:
        plan, streams, before = self.plan, self.streams, self.reads_before
        launchers = self.ops.launchers or [Launcher(pdl=0), Launcher(pdl=0)]
        for launcher in launchers:
            launcher.dependent, launcher.behind = False, 0
        self.ops.embed(tokens, self._embedding[0])
        if not self.reducer.silent:  # itself an ordinary launch; on its own stream the first product may begin before its end
            self.reducer.reduce(*self._embedding, 0, launchers[0])
            launchers[0].dependent &= plan.lanes == 1
        self._events: dict[int, Any] = {}
        self._awaited: set[tuple[str, int]] = set()
        if plan.lanes == 2:
            streams.wait("attention", streams.record("main", "embedding"))
        for step in plan.steps:
            name = self._lane_names[step.lane]
            launcher = launchers[step.lane]
            lane = self._lanes[step.lane]
            with streams.on(name):
                absorbed = self._collect(step)
                self._note(name, step.name)
                if step.kind == "agree":
                    self._agree(step, lane, absorbed, self._message(step), launcher)
                elif step.kind == "attention":
                    if before and step.layer > 0:  # the first reads the embedding, which was made just now
                        launcher.next_waits = BEHIND
                    self.ops.qkv(step, lane, absorbed)
                    if plan.weaves(step):
                        self._attend_beside(step, lane, launchers[1])
                        continue
                    self.ops.attend(step, launcher)
                    self.ops.output(step, launcher, lane, self._message(step))
                else:
                    if before:
                        launcher.next_waits = BEHIND if self.reducer.silent else BEHIND_BUT_NEWEST
                    self.ops.gate_up(step, lane, absorbed)
                    self.ops.down(step, lane, self._message(step), self._added(step))
                self._send(step, name, launcher)
        final = plan.final
        absorbed = self._collect(final)
        self._note("main", "head")
        self.ops.head(final, self._lanes[final.lane], absorbed, logits)

    @property
    def reads_before(self) -> bool:
        """Whether products of the line may read before they wait."""
        return self.plan.skips and self.ops.reads_before

    @property
    def beside(self) -> set[int]:
        """Compiled kernels that were started on other streams than a woven line's."""
        return {function for launcher in (*self.ops.launchers[1:], *self._sum_launchers) for function in launcher.started}

    @property
    def early_sums(self) -> Collection[int]:
        """Those of them that are sums launched before their message is there."""
        return self._sum_launchers[1].started if self._sums_early(1) else ()

    def _sums_early(self, side: int) -> bool:
        """Of two kernels that may both begin before this one ends, in a graph neither does: it is the next product that may, and the sum
        starts when its message is there. Unless the tiles are made for it, or, woven, a product that does not need the message makes
        way for the MLP's (``graph_edges.py``); attention's has time."""
        made_for = self.ops.early_sums and self.reducer.early
        return made_for and (not self.plan.woven or (self.reads_before and side == 1))

    def _message(self, step: Step) -> Tensor:
        return self._ring[self._slots[step.output]][0]

    def _added(self, step: Step) -> Tensor | None:
        """The attention output that a parallel layer's MLP adds to its own, after waiting for it if it was made beside the line."""
        if step.adds_output is None:
            return None
        self._await(self._lane_names[step.lane], step.adds_output)
        return self._ring[self._slots[step.adds_output]][0]

    def _attend_beside(self, step: Step, lane: Lane, launcher: Launcher) -> None:
        """An ordinary launch: begun early, it would hold registers that the next product's programs need."""
        self.streams.wait("attention", self.streams.record("main", f"qkv of {step.name}"))
        with self.streams.on("attention"):
            launcher.dependent = False
            self._note("attention", f"attend of {step.name}")
            self.ops.attend(step, launcher)
            self.ops.output(step, launcher, lane, self._message(step))
            self._send(step, "attention", launcher)

    def _await(self, name: str, output: int) -> None:
        if output in self._events and (name, output) not in self._awaited:
            self._awaited.add((name, output))
            self.streams.wait(name, self._events[output])

    def _collect(self, step: Step) -> list[Tensor]:
        """The outputs a step absorbs, after waiting for those made elsewhere."""
        found = []
        for output in step.absorbs:
            if output == 0:
                found.append(self._embedding[0 if self.reducer.silent else 1])
                continue
            self._await(self._lane_names[step.lane], output)
            summed = self._by_output[output].reduce and not self.reducer.silent
            found.append(self._ring[self._slots[output]][1 if summed else 0])
        return found

    def _send(self, step: Step, name: str, launcher: Launcher) -> None:
        """Start this output's sum, and leave an event where a consumer runs on another stream."""
        streams, summed = self.streams, step.reduce and not self.reducer.silent
        buffers = self._ring[self._slots[step.output]]
        if summed and self.plan.lanes == 1 and self.plan.in_flight(step):
            side = 0 if step.kind == "attention" else 1
            beside = f"sum-{side}"
            streams.wait(beside, streams.record(name, step.name))
            with streams.on(beside):
                self._sum_launchers[side].dependent = self._sums_early(side)
                self._note(beside, f"sum of {step.name}")
                self.reducer.reduce(*buffers, side, self._sum_launchers[side])
                self._events[step.output] = streams.record(beside, f"sum of {step.name}")
            return
        if summed:
            self._note(name, f"sum of {step.name}")
            self.reducer.reduce(*buffers, step.lane, launcher)
        if name != self._lane_names[step.lane] or any(other.lane != step.lane for other in self.plan.consumers(step.output)):
            self._events[step.output] = streams.record(name, step.name)

    def _agree(self, step: Step, lane: Lane, absorbed: Sequence[Tensor], message: Tensor, launcher: Launcher) -> None:
        """Diverged streams become one: each rank sends its stream / ranks, the sum is the mean."""
        if absorbed:
            old, new = lane.advance()
            total = absorbed[0].float() if not step.keeps_stream else old + absorbed[0]
            for output in absorbed[1:]:
                total = total + output
            new.copy_(total)
        message.copy_(lane.stream / self.tp)
        launcher.dependent = False

    def _note(self, name: str, what: str) -> None:
        note = getattr(self.streams, "compute", None)
        if note is not None:
            note(name, what)
