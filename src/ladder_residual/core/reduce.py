"""When and how the partial outputs of the ranks are summed.

``reducer.start(partial)`` begins a sum over ranks and returns a :class:`Pending`; ``pending.wait()`` returns the sum. Between
the two, the caller computes. Every reducer is differentiable, and hides its backward the same way: each rank's stream is its
own variable, so the gradient of a sum over ranks is again a sum over ranks; it *starts* where the forward waited and is *waited
for* where the forward started. Autograd walks the graph backwards, so whatever overlapped in the forward overlaps there too.

Consequence for training: a parameter that every rank holds whole (norms, routers) collects only this rank's share of its
gradient; ``parallel.finish_gradients`` sums those once per optimizer step.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .sockets import PeerSockets

# Up to this size an exchange of whole partials + local sum (one network trip) beats gloo's all-reduce (two). Two ranks send the
# same number of bytes either way; more ranks send size/2 times as many, so there it is kept for messages where latency rules.
EXCHANGE_BELOW_TWO_RANKS = 1 << 20
EXCHANGE_BELOW = 1 << 16
# How partials travel: as they are, or wider ones rounded to bfloat16. Then each partial is off by at most 2^-8 of itself. Exchanged
# partials are added in their own dtype, so that is the whole error; an all-reduce also adds in bfloat16, 2^-8 of the sum per rank.
WIRES = {"same": None, "bf16": torch.bfloat16}


class Sum:
    """A sum over ranks on its way. ``finish`` blocks until it is there (on CUDA: makes the current stream wait)."""

    def finish(self) -> Tensor:
        raise NotImplementedError


class _Ready(Sum):
    def __init__(self, total: Tensor) -> None:
        self.total = total

    def finish(self) -> Tensor:
        return self.total


class _InFlight(Sum):
    def __init__(self, work: dist.Work, buffer: Tensor, reducer: GroupReducer) -> None:
        self.work, self.buffer, self.reducer = work, buffer, reducer

    def finish(self) -> Tensor:
        self.reducer.settle()
        self.work.wait()
        return self.buffer


class _Exchange(Sum):
    """Every rank's partial, on its way to every other. Added in rank order everywhere, so the ranks agree to the last bit."""

    def __init__(self, sockets: PeerSockets, number: int, partials: list[Tensor], dtype: torch.dtype) -> None:
        self.sockets, self.number, self.partials, self.dtype = sockets, number, partials, dtype
        self.total: Tensor | None = None

    def finish(self) -> Tensor:
        if self.total is None:
            self.sockets.receive(self.number)
            self.total = self.partials[0].to(self.dtype) + self.partials[1]
            for partial in self.partials[2:]:
                self.total += partial
            self.partials = []
        return self.total


class _Rounded(Sum):
    """A sum in the dtype of the wire, given back in the partial's own."""

    def __init__(self, inner: Sum, dtype: torch.dtype) -> None:
        self.inner, self.dtype = inner, dtype

    def finish(self) -> Tensor:
        return self.inner.finish().to(self.dtype)


class _Late(Sum):
    """Emulated latency: ready no sooner than ``ready_at`` on this host's clock."""

    def __init__(self, inner: Sum, ready_at: float) -> None:
        self.inner, self.ready_at = inner, ready_at

    def finish(self) -> Tensor:
        total = self.inner.finish()
        left = self.ready_at - time.perf_counter()
        if left > 0:
            time.sleep(left)  # not spun: on a small host the spinning rank would take the core its peer's network thread needs
        return total


class _Ticket:
    """Ties the two ends of one sum together, so that the backward of one end finds what the other started."""

    def __init__(self, reducer: Reducer, forward: Sum | None = None) -> None:
        self.reducer = reducer
        self.forward = forward
        self.backward: Sum | None = None
        self.keep = False  # the sum is waited for again (a layer that gradient checkpointing recomputes)

    def finish(self) -> Tensor:
        assert self.forward is not None, "waited for a sum that was never started, or a second time"
        total = self.forward.finish()
        if not self.keep:
            self.forward = None  # autograd may keep this ticket until the backward; the sum need not live as long
        return total


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, partial: Tensor, ticket: _Ticket) -> Tensor:
        ctx.ticket = ticket
        ticket.forward = ticket.reducer.launch(partial.detach())
        return partial.new_empty(()).expand(partial.shape)  # a place in the graph; the sum itself travels in the ticket

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        total = ctx.ticket.backward.finish()
        ctx.ticket.backward = None
        return total, None


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, place: Tensor, ticket: _Ticket) -> Tensor:
        ctx.ticket = ticket
        return ticket.finish().detach()  # a new tensor each time: a recomputed forward waits for the same sum again

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.ticket.backward = ctx.ticket.reducer.launch(grads[0])
        return grads[0], None  # stands for the sum until _Start.backward, its only reader, finishes it


class Pending(NamedTuple):
    """A sum in flight, and what is still to be done with it. A tuple, so that FSDP and checkpointing see its tensors.

    ``own`` is subtracted from the sum (the delayed wiring has added this rank's share already); ``after`` is applied to it
    (the post-norm of families that have one: it is no linear map, so it must see the sum and not the partials).
    """

    place: Tensor
    ticket: _Ticket
    own: Tensor | None = None
    after: Callable[[Tensor], Tensor] | None = None

    def wait(self) -> Tensor:
        self.ticket.reducer.waited(self.ticket)
        total = self.ticket.reducer.finish(self)
        if self.own is not None:
            total = total - self.own
        return total if self.after is None else self.after(total)


class Reducer:
    """One process: the partial is the sum already."""

    size = 1
    rank = 0

    def start(self, partial: Tensor) -> Pending:
        """Begin the sum of this rank's ``partial`` with the other ranks'."""
        return Pending(partial, _Ticket(self))

    def finish(self, pending: Pending) -> Tensor:
        return pending.place

    def launch(self, partial: Tensor) -> Sum:
        """The sum itself, without autograd."""
        return _Ready(partial)

    def gather(self, local: Tensor) -> Tensor:
        """Concatenate the ranks' tensors along the last dim (vocabulary-parallel logits). Differentiable."""
        return local

    def waited(self, ticket: _Ticket) -> None:
        """Called as a sum is waited for. For observers."""

    def settle(self) -> None:
        """Called before this rank waits for its peers by other ways: what it owes them here comes first."""


class GroupReducer(Reducer):
    """Sums over a process group, blocking: the sum is complete when ``start`` returns."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.size = dist.get_world_size(group)
        self.rank = dist.get_rank(group)

    def start(self, partial: Tensor) -> Pending:
        ticket = _Ticket(self)
        if torch.is_grad_enabled() and partial.requires_grad:
            return Pending(_Start.apply(partial, ticket), ticket)
        ticket.forward = self.launch(partial)
        return Pending(partial, ticket)

    def finish(self, pending: Pending) -> Tensor:
        if torch.is_grad_enabled() and pending.place.requires_grad:
            return _Wait.apply(pending.place, pending.ticket)
        return pending.ticket.finish()

    def launch(self, partial: Tensor) -> Sum:
        return _Ready(self.all_reduce(partial).finish())

    def all_reduce(self, partial: Tensor) -> Sum:
        buffer = partial.clone(memory_format=torch.contiguous_format)  # never write into what the module returned
        work = dist.all_reduce(buffer, group=self.group, async_op=True)
        assert work is not None
        return _InFlight(work, buffer, self)

    def gather(self, local: Tensor) -> Tensor:
        return _Gather.apply(local, self)

    def gather_parts(self, local: Tensor) -> list[Tensor]:
        """Every rank's tensor, in rank order."""
        self.settle()
        parts = [torch.empty_like(local) for _ in range(self.size)]
        dist.all_gather(parts, local, group=self.group)
        return parts


class _Gather(torch.autograd.Function):
    """All ranks compute the same loss from the gathered tensor, so each keeps its own slice of the gradient."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, reducer: GroupReducer) -> Tensor:
        ctx.width, ctx.rank = local.shape[-1], reducer.rank
        return torch.cat(reducer.gather_parts(local.contiguous()), dim=-1)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0].narrow(-1, ctx.rank * ctx.width, ctx.width), None


class AsyncReducer(GroupReducer):
    """Sums over a process group while the caller goes on computing.

    With ``sockets`` (CPU hosts), messages of at most ``exchange_below`` bytes are exchanged whole and summed locally: one trip over
    the network instead of two, and no helper thread. ``wire`` is one of ``WIRES``; the ranks' own partials are rounded like the
    others', so that all ranks hold the same sum.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        sockets: PeerSockets | None = None,
        exchange_below: int | None = None,
        wire: str = "same",
    ) -> None:
        super().__init__(group)
        if wire not in WIRES:
            raise ValueError(f"unknown wire {wire!r}; choose {' or '.join(WIRES)}")
        self.wire = WIRES[wire]
        if exchange_below is None:
            exchange_below = EXCHANGE_BELOW_TWO_RANKS if self.size == 2 else EXCHANGE_BELOW
        if exchange_below < 0:
            raise ValueError(f"exchange_below is a number of bytes, 0 or more; got {exchange_below}")
        self.sockets, self.exchange_below = sockets, exchange_below

    def launch(self, partial: Tensor) -> Sum:
        dtype = partial.dtype
        rounded = self.wire is not None and dtype.itemsize > self.wire.itemsize
        message = partial.to(self.wire) if rounded else partial
        if self.sockets is not None and self._is_small(message):
            return _Exchange(self.sockets, *self.sockets.exchange(message), dtype)
        return _Rounded(self.all_reduce(message), dtype) if rounded else self.all_reduce(message)

    def gather_parts(self, local: Tensor) -> list[Tensor]:
        if self.sockets is None or not self._is_small(local):
            return super().gather_parts(local)
        number, parts = self.sockets.exchange(local)
        self.sockets.receive(number)
        return parts

    def _is_small(self, message: Tensor) -> bool:
        return message.numel() * message.element_size() <= self.exchange_below

    def settle(self) -> None:
        if self.sockets is not None:
            self.sockets.settle()


class LatencyReducer(AsyncReducer):
    """An asynchronous reducer over an *emulated* slower link: no sum is there sooner than ``seconds`` after its start."""

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        sockets: PeerSockets | None = None,
        exchange_below: int | None = None,
        wire: str = "same",
        *,
        seconds: float,
    ) -> None:
        super().__init__(group, sockets, exchange_below, wire)
        if not 0 <= seconds <= 60:
            raise ValueError(f"an emulated latency is between 0 and 60 seconds, got {seconds}")
        self.seconds = seconds

    def launch(self, partial: Tensor) -> Sum:
        ready_at = time.perf_counter() + self.seconds
        return _Late(super().launch(partial), ready_at)


class RecordingReducer(Reducer):
    """Passes everything on to ``inner`` and keeps the order of events: ``("start", k)``, ``("wait", k)``, ``("compute", name)``.

    That order is the proof of the overlap: a sum is hidden exactly if some compute stands between its start and its wait.
    """

    def __init__(self, inner: Reducer | None = None) -> None:
        self.inner = inner or Reducer()
        self.size, self.rank = self.inner.size, self.inner.rank
        self.events: list[tuple[str, int | str]] = []
        self._ids: dict[int, int] = {}
        self._tickets: list[_Ticket] = []  # keeps them alive, so that ids stay unique

    def start(self, partial: Tensor) -> Pending:
        pending = self.inner.start(partial)
        pending.ticket.reducer = self
        self._ids[id(pending.ticket)] = len(self._tickets)
        self.events.append(("start", len(self._tickets)))
        self._tickets.append(pending.ticket)
        return pending

    def finish(self, pending: Pending) -> Tensor:
        return self.inner.finish(pending)

    def launch(self, partial: Tensor) -> Sum:
        return self.inner.launch(partial)

    def gather(self, local: Tensor) -> Tensor:
        return self.inner.gather(local)

    def settle(self) -> None:
        self.inner.settle()

    def waited(self, ticket: _Ticket) -> None:
        self.events.append(("wait", self._ids[id(ticket)]))

    def watch(self, module: torch.nn.Module, name: str) -> None:
        """Record when ``module`` begins to compute."""
        module.register_forward_pre_hook(lambda *_: self.events.append(("compute", name)))

    def check_each_waited_once(self) -> None:
        for ticket in range(len(self._tickets)):
            waits = self.events.count(("wait", ticket))
            if waits != 1:
                raise AssertionError(f"sum {ticket} was waited for {waits} times; a started sum is waited for exactly once")

    def hidden(self) -> list[bool]:
        """For each sum, whether anything was computed between its start and its wait."""
        positions = {event: index for index, event in enumerate(self.events)}
        spans = [(positions["start", k], positions["wait", k]) for k in range(len(self._tickets))]
        return [any(event == "compute" for event, _ in self.events[start:wait]) for start, wait in spans]
