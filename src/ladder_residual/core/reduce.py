"""When and how the partial outputs of the ranks are all-reduced.

``reducer.start(partial)`` starts an all-reduce and returns a :class:`Pending`; ``pending.wait()`` returns the reduced tensor. The
caller computes in between. Every reducer is differentiable and overlaps its backward the same way. Each rank's stream is a variable
of its own, so the gradient of an all-reduce is again an all-reduce: it *starts* where the forward waited and is *waited for* where
the forward started. Autograd runs the graph backwards, so what overlapped in the forward overlaps in the backward too.

Consequence for training: a parameter that every rank holds whole (norms, routers) collects only this rank's part of its gradient.
``train.gradients.finish_gradients`` all-reduces those once per optimizer step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor


class ReduceWork:
    """An all-reduce that was launched, without autograd. Like ``torch.distributed.Work``, but ``wait`` returns the tensor."""

    def wait(self) -> Tensor:
        """Block until the result is there. On CUDA only the current stream waits."""
        raise NotImplementedError


class CompletedWork(ReduceWork):
    """An all-reduce whose result is there already."""

    def __init__(self, result: Tensor) -> None:
        self.result = result

    def wait(self) -> Tensor:
        return self.result


class _GroupWork(ReduceWork):
    """An all-reduce of a process group."""

    def __init__(self, work: dist.Work, buffer: Tensor, reducer: GroupReducer) -> None:
        self.work, self.buffer, self.reducer = work, buffer, reducer

    def wait(self) -> Tensor:
        self.reducer.drain()
        self.work.wait()
        return self.buffer


class Reduction:
    """One all-reduce from ``start`` to ``wait``, and the all-reduce of its gradient. Both autograd nodes hold it, so that in each
    direction the node that waits finds the work that the other one launched."""

    def __init__(self, reducer: Reducer) -> None:
        self.reducer = reducer
        self.forward: ReduceWork | None = None
        self.backward: ReduceWork | None = None
        self.waited_again = False  # gradient checkpointing recomputes the layer that waits

    def wait_forward(self) -> Tensor:
        assert self.forward is not None, "waited for an all-reduce that was not started, or for a second time"
        result = self.forward.wait()
        if not self.waited_again:
            self.forward = None  # autograd may keep this object until the backward; the result need not live as long
        return result


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, partial: Tensor, reduction: Reduction) -> Tensor:
        ctx.reduction = reduction
        reduction.forward = reduction.reducer.launch(partial.detach())
        return partial.new_empty(()).expand(partial.shape)  # a node of the graph without memory of its own

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        result = ctx.reduction.backward.wait()
        ctx.reduction.backward = None
        return result, None


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, placeholder: Tensor, reduction: Reduction) -> Tensor:
        ctx.reduction = reduction
        return reduction.wait_forward().detach()  # a new tensor each time: a recomputed layer waits once more

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.reduction.backward = ctx.reduction.reducer.launch(grads[0])
        return grads[0], None  # stands for the result until _Start.backward, its only reader, waits for it


class Pending(NamedTuple):
    """An all-reduce in flight, and what is done with its result. A tuple, so that FSDP and checkpointing see its tensors.

    ``own`` is subtracted from the result: the delayed wiring has added this rank's partial already. ``after`` is applied to the
    result: a post-norm is not linear, so it must see the reduced tensor and not the partials.
    """

    placeholder: Tensor
    reduction: Reduction
    own: Tensor | None = None
    after: Callable[[Tensor], Tensor] | None = None

    def wait(self) -> Tensor:
        result = self.reduction.reducer.wait(self)
        if self.own is not None:
            result = result - self.own
        return result if self.after is None else self.after(result)


class Reducer:
    """One process: the partial is the result already."""

    size = 1
    rank = 0

    def start(self, partial: Tensor) -> Pending:
        """Start the all-reduce of this rank's ``partial``."""
        return Pending(partial, Reduction(self))

    def wait(self, pending: Pending) -> Tensor:
        """The result of ``pending``, without its ``own`` and ``after``."""
        return pending.placeholder

    def arrived(self, result: Tensor) -> Pending:
        """What an all-reduce gave, as one in flight that may be waited for any number of times."""
        return Pending(result, Reduction(Reducer()))

    def launch(self, partial: Tensor) -> ReduceWork:
        """The all-reduce itself, without autograd."""
        return CompletedWork(partial)

    def gather(self, local: Tensor) -> Tensor:
        """Concatenate the ranks' tensors along the last dim (vocabulary-parallel logits). Differentiable."""
        return local

    def drain(self) -> None:
        """Complete the messages that peers wait for. Called before this rank waits for its peers in any other way."""


class GroupReducer(Reducer):
    """All-reduces over a process group, blocking: the result is there when ``start`` returns."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.size = dist.get_world_size(group)
        self.rank = dist.get_rank(group)

    def start(self, partial: Tensor) -> Pending:
        reduction = Reduction(self)
        if torch.is_grad_enabled() and partial.requires_grad:
            return Pending(_Start.apply(partial, reduction), reduction)
        reduction.forward = self.launch(partial)
        return Pending(partial, reduction)

    def wait(self, pending: Pending) -> Tensor:
        if torch.is_grad_enabled() and pending.placeholder.requires_grad:
            return _Wait.apply(pending.placeholder, pending.reduction)
        return pending.reduction.wait_forward()

    def launch(self, partial: Tensor) -> ReduceWork:
        return CompletedWork(self.all_reduce(partial).wait())

    def all_reduce(self, partial: Tensor) -> ReduceWork:
        buffer = partial.clone(memory_format=torch.contiguous_format)  # never write into what the module returned
        work = dist.all_reduce(buffer, group=self.next_group(), async_op=True)
        assert work is not None
        return _GroupWork(work, buffer, self)

    def next_group(self) -> dist.ProcessGroup | None:
        """Of the all-reduce that is launched next; the same on every rank."""
        return self.group

    def gather(self, local: Tensor) -> Tensor:
        return _Gather.apply(local, self)

    def gather_parts(self, local: Tensor) -> list[Tensor]:
        """Every rank's tensor, in rank order."""
        self.drain()
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


class RecordingReducer(Reducer):
    """Passes everything on to ``inner`` and records the order of events: ``("start", k)``, ``("wait", k)``, ``("compute", name)``.

    The order proves the overlap: an all-reduce is hidden if and only if something is computed between its start and its wait.
    """

    def __init__(self, inner: Reducer | None = None) -> None:
        self.inner = inner or Reducer()
        self.size, self.rank = self.inner.size, self.inner.rank
        self.events: list[tuple[str, int | str]] = []
        self.reductions: list[Reduction] = []  # number k of the events is the position in this list

    def start(self, partial: Tensor) -> Pending:
        self.events.append(("start", len(self.reductions)))
        pending = self.inner.start(partial)
        pending.reduction.reducer = self
        self.reductions.append(pending.reduction)
        return pending

    def wait(self, pending: Pending) -> Tensor:
        self.events.append(("wait", self.reductions.index(pending.reduction)))
        return self.inner.wait(pending)

    def launch(self, partial: Tensor) -> ReduceWork:
        return self.inner.launch(partial)

    def gather(self, local: Tensor) -> Tensor:
        return self.inner.gather(local)

    def drain(self) -> None:
        self.inner.drain()

    def watch(self, module: torch.nn.Module, name: str) -> None:
        """Record when ``module`` starts to compute."""
        module.register_forward_pre_hook(lambda *_: self.events.append(("compute", name)))
