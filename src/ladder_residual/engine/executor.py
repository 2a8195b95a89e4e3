"""Runs a plan: which CUDA stream, which buffers, when to wait. The same code runs eagerly (prefill), under graph capture (decode) and on
the CPU (tests)."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from .cuda.launcher import Launcher
from .cuda.pdl import PdlMode
from .cuda.streams import Streams
from .reducers import EngineReducer
from .residual_stream import ResidualStream
from .schedule import MAX_ADDS, Plan, Step

# Outputs live in a ring of buffers. With two chains one runs at most two layers ahead (it then needs the other's output), so four layers
# of buffers are never overwritten early. Interleaved, attention beside the chain starts after its layer's QKV.
RING = 8
# Which of the reducer's two channels, and which stream, an all-reduce beside the chain uses.
ATTENTION, MLP = 0, 1
REDUCE_STREAMS = ("reduce-attention", "reduce-mlp")


class Ops(Protocol):
    """The modules of a step. A chain's kernels are launched by ``launchers[chain]``."""

    @property
    def launchers(self) -> Sequence[Any]: ...

    @property
    def pdl_all_reduce(self) -> bool:
        """Whether all-reduces beside the chain are launched before their input is complete."""
        ...

    @property
    def reads_before_wait(self) -> bool:
        """Whether QKV and gate/up may read before they wait, where the plan allows it."""
        ...

    def embed(self, tokens: Tensor, partial: Tensor) -> None: ...

    # attention: these three in this order
    def qkv(self, step: Step, stream: ResidualStream, added: Sequence[Tensor]) -> None: ...

    def attend(self, step: Step, launch: Launcher) -> None: ...

    def out_proj(self, step: Step, launch: Launcher, stream: ResidualStream, partial: Tensor) -> None: ...

    # the MLP: these two
    def gate_up(self, step: Step, stream: ResidualStream, added: Sequence[Tensor]) -> None: ...

    def down(self, step: Step, stream: ResidualStream, partial: Tensor, attention_partial: Tensor | None) -> None: ...

    def head(self, step: Step, stream: ResidualStream, added: Sequence[Tensor], logits: Tensor) -> None: ...


class Executor:
    """Buffers for ``rows`` rows (sequences, or tokens of a prompt) and the loop over a plan's steps."""

    def __init__(
        self, plan: Plan, ops: Ops, reducer: EngineReducer, streams: Streams, *, rows: int, hidden: int, tp: int,
        dtype: torch.dtype, device: torch.device,
    ) -> None:  # fmt: skip
        widest = max(len(step.reads) for step in (*plan.steps, plan.head))
        assert widest <= MAX_ADDS, f"a step adds {widest} outputs, the kernels take {MAX_ADDS}"
        self.plan, self.ops, self.reducer, self.streams, self.tp = plan, ops, reducer, streams, tp
        self._residual_streams = [ResidualStream(rows, hidden, device) for _ in range(plan.num_chains)]
        self._chain_streams = ["main"] if plan.num_chains == 1 else ["attention", "main"]
        self._embedding = reducer.allocate(rows, hidden, dtype, device)  # (partial, reduced), as every buffer of the ring
        keep_partial = any(step.reduces_others for step in plan.steps)
        self._ring = [reducer.allocate(rows, hidden, dtype, device, keep_partial=keep_partial) for _ in range(RING)]
        self._by_output = {step.output: step for step in plan.steps if step.kind != "join"}
        self._slots = {output: index % RING for index, output in enumerate(self._by_output)}
        self._launchers = ops.launchers or [Launcher(PdlMode.OFF), Launcher(PdlMode.OFF)]
        main = self._launchers[0]
        if plan.schedule == "interleaved" and main.pdl:
            # Triggered at once, down would take the SMs that attention needs. And a kernel that reads before it waits relies on the
            # kernel before it having started only when everything before that was complete.
            main.pdl = PdlMode.WAIT_THEN_TRIGGER
        pdl = PdlMode.TRIGGER_THEN_WAIT if main.pdl else PdlMode.OFF
        self._reduce_launchers = [Launcher(pdl, smem_carveout=main.smem_carveout) for _ in REDUCE_STREAMS]

    def run(self, tokens: Tensor, logits: Tensor) -> None:
        plan, streams = self.plan, self.streams
        self._events: dict[int, Any] = {}  # by output: when it is complete, where a consumer runs on another stream
        self._waited: set[tuple[str, int]] = set()
        self._embed(tokens)
        if plan.num_chains == 2:
            streams.wait("attention", streams.record("main", "embedding"))
        for step in plan.steps:
            added = self._collect(step)
            with streams.on(self._chain_streams[step.chain], step.name):
                self._run_step(step, added)
        added = self._collect(plan.head)
        with streams.on("main", "head"):
            self.ops.head(plan.head, self._residual_streams[plan.head.chain], added, logits)

    def _embed(self, tokens: Tensor) -> None:
        for launcher in self._launchers:
            launcher.dependent, launcher.late_waits = False, 0
        self.ops.embed(tokens, self._embedding[0])
        if not self.reducer.is_noop:
            first = self._launchers[0]
            self.reducer.reduce(*self._embedding, ATTENTION, first)
            # On the same stream the first kernel may start before the all-reduce ends; with two chains an event comes between.
            first.dependent &= self.plan.num_chains == 1

    def _run_step(self, step: Step, added: Sequence[Tensor]) -> None:
        launcher, stream = self._launchers[step.chain], self._residual_streams[step.chain]
        if step.kind == "join":
            self._join(step, stream, added, launcher)
            return
        partial = self._ring[self._slots[step.output]][0]
        if step.kind == "average":
            self._average(step, stream, added, partial, launcher)
        elif step.kind == "attention":
            if self.reads_before_wait and step.layer > 0:  # the first layer reads the embedding, which was written just now
                launcher.next_pdl = PdlMode.WAIT_AFTER_COMPUTE
            self.ops.qkv(step, stream, added)
            if self.plan.runs_beside_mlp(step):
                self._attend_beside(step, stream, partial)
                return
            self.ops.attend(step, launcher)
            self.ops.out_proj(step, launcher, stream, partial)
        else:
            if self.reads_before_wait:
                # Without all-reduces, everything older than the previous kernel is complete.
                launcher.next_pdl = PdlMode.WAIT_AFTER_COMPUTE if self.reducer.is_noop else PdlMode.WAIT_BEFORE_NEWEST
            self.ops.gate_up(step, stream, added)
            self.ops.down(step, stream, partial, self._attention_partial(step))
        self._send(step, self._chain_streams[step.chain], launcher)

    @property
    def reads_before_wait(self) -> bool:
        """Whether QKV and gate/up of the chain read before they wait."""
        return self.plan.can_read_before_wait and self.ops.reads_before_wait

    @property
    def side_functions(self) -> set[int]:
        """Compiled kernels that were launched on other streams than an interleaved chain's."""
        return {function for launcher in (*self._launchers[1:], *self._reduce_launchers) for function in launcher.launched}

    @property
    def early_all_reduces(self) -> Collection[int]:
        """Those of them that are all-reduces launched before their input is complete."""
        return self._reduce_launchers[MLP].launched if self._launches_early(MLP) else ()

    def _launches_early(self, channel: int) -> bool:
        """Whether an all-reduce beside the chain is launched before its input is complete. In a graph, of two kernels that may both start
        before a third ends, neither does; so by default only the chain's next kernel does. The exceptions: tiles made for it, and,
        interleaved, the MLP's all-reduce, for which a kernel that does not need it makes way (``graph_edges.py``)."""
        made_for = self.ops.pdl_all_reduce and self.reducer.pdl
        return made_for and (not self.plan.interleaved or (self.reads_before_wait and channel == MLP))

    def _attention_partial(self, step: Step) -> Tensor | None:
        """The attention partial that a parallel layer's MLP adds to its own, once it is complete."""
        if step.partial_adds_output is None:
            return None
        self._wait(self._chain_streams[step.chain], step.partial_adds_output)
        return self._ring[self._slots[step.partial_adds_output]][0]

    def _attend_beside(self, step: Step, stream: ResidualStream, partial: Tensor) -> None:
        """An ordinary launch: started early, attention would hold registers that the chain's next kernel needs."""
        launcher = self._launchers[1]
        self.streams.wait("attention", self.streams.record("main", f"qkv of {step.name}"))
        with self.streams.on("attention", f"attend of {step.name}"):
            launcher.dependent = False
            self.ops.attend(step, launcher)
            self.ops.out_proj(step, launcher, stream, partial)
            self._send(step, "attention", launcher)

    def _wait(self, name: str, output: int) -> None:
        if output in self._events and (name, output) not in self._waited:
            self._waited.add((name, output))
            self.streams.wait(name, self._events[output])

    def _collect(self, step: Step) -> list[Tensor]:
        """The outputs a step adds to the residual stream, after waiting for those computed on other streams."""
        found = []
        for output in step.adds:
            if output == 0:
                found.append(self._embedding[0 if self.reducer.is_noop else 1])
                continue
            self._wait(self._chain_streams[step.chain], output)
            reduced = self._by_output[output].reduce and not self.reducer.is_noop
            found.append(self._ring[self._slots[output]][1 if reduced else 0])
        return [*found, *(self._ring[self._slots[output]][0] for output in step.adds_own)]

    def _send(self, step: Step, name: str, launcher: Launcher) -> None:
        """Start this output's all-reduce, and record an event where a consumer runs on another stream."""
        streams, reduces = self.streams, step.reduce and not self.reducer.is_noop
        buffers, what = self._ring[self._slots[step.output]], f"all-reduce of {step.name}"
        if reduces and self.plan.num_chains == 1 and self.plan.overlaps(step):
            channel = ATTENTION if step.kind == "attention" else MLP
            beside, launcher = REDUCE_STREAMS[channel], self._reduce_launchers[channel]
            streams.wait(beside, streams.record(name, step.name))
            with streams.on(beside, what):
                launcher.dependent = self._launches_early(channel)
                self._reduce(step, buffers, channel, launcher)
                self._events[step.output] = streams.record(beside, what)
            return
        if reduces:
            with streams.on(name, what):
                self._reduce(step, buffers, step.chain, launcher)
        other_chain = any(consumer.chain != step.chain for consumer in self.plan.consumers(step.output))
        if other_chain or name != self._chain_streams[step.chain]:
            self._events[step.output] = streams.record(name, step.name)

    def _reduce(self, step: Step, buffers: tuple[Tensor, Tensor], channel: int, launcher: Launcher) -> None:
        self.reducer.reduce(*buffers, channel, launcher)
        if step.reduces_others:  # this rank's own part is in the stream already
            partial, reduced = buffers
            reduced.sub_(partial)
            launcher.dependent = False

    def _average(
        self, step: Step, stream: ResidualStream, added: Sequence[Tensor], partial: Tensor, launcher: Launcher
    ) -> None:  # fmt: skip
        """Diverged streams become one: each rank sends its stream / tp, and the all-reduce gives the mean."""
        if added:
            self._join(step, stream, added, launcher)
        partial.copy_(stream.current / self.tp)
        launcher.dependent = False

    def _join(self, step: Step, stream: ResidualStream, added: Sequence[Tensor], launcher: Launcher) -> None:
        old, new = stream.advance()
        total = added[0].float() if not step.keeps_stream else old + added[0]
        for output in added[1:]:
            total = total + output
        new.copy_(total)
        launcher.dependent = False
