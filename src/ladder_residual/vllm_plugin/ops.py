"""The opaque ops between two modules: start this module's sum, wait for the one before, add, norm.

One op, not several. Inductor moves separate start and wait ops together (nothing overlaps any more), and with functional
collectives it reads a buffer before the wait that belongs to it (wrong text, no error). An op it cannot look into it can neither
split nor move: the next module reads the op's output, and the op after it reads the stream this one returns.

``in_flight`` is the partial whose sum is still on its way. The op finds the sum itself in the process's ``Link``; it takes the
partial so that nobody reuses its memory before.
"""

from __future__ import annotations

from torch import Tensor
from torch.library import Library
from vllm.utils.torch_utils import direct_register_custom_op

from vllm import ir

from .link import link

_library = Library("ladder_residual", "FRAGMENT")  # the ops live as long as it does


def _boundary(
    partial: Tensor,
    in_flight: Tensor | None,
    stream: Tensor,
    weight: Tensor,
    epsilon: float,
    keep: bool,
    arrived: bool,
    next_is_attention: bool,
) -> tuple[Tensor, Tensor]:
    """What the next module reads, normed, and the stream. ``arrived``: ``in_flight`` is a complete sum (from another stage)."""
    here = link()
    started = here.start(partial, next_is_attention=next_is_attention)
    total = _previous(in_flight, arrived)
    if not keep:
        latest = here.finish(started)
        total = latest if total is None else total + latest
    else:
        here.in_flight.append(started)
    stream = stream.clone() if total is None else stream + total
    return ir.ops.rms_norm(stream, weight, epsilon), stream


def _boundary_shapes(
    partial: Tensor,
    in_flight: Tensor | None,
    stream: Tensor,
    weight: Tensor,
    epsilon: float,
    keep: bool,
    arrived: bool,
    next_is_attention: bool,
) -> tuple[Tensor, Tensor]:
    return stream.new_empty(stream.shape), stream.new_empty(stream.shape)


def _drain(partial: Tensor, in_flight: Tensor | None, stream: Tensor, arrived: bool) -> tuple[Tensor, Tensor]:
    """The end of a stage: the sum of its last module, and the stream without it. Nothing stays in flight."""
    started = link().start(partial, next_is_attention=False)
    total = _previous(in_flight, arrived)
    stream = stream.clone() if total is None else stream + total
    latest = link().finish(started)
    return latest.clone() if latest is partial else latest, stream


def _drain_shapes(partial: Tensor, in_flight: Tensor | None, stream: Tensor, arrived: bool) -> tuple[Tensor, Tensor]:
    return partial.new_empty(partial.shape), stream.new_empty(stream.shape)


def _previous(in_flight: Tensor | None, arrived: bool) -> Tensor | None:
    sums = link().in_flight
    if in_flight is None:
        sums.clear()  # left over only if an earlier forward pass failed
        return None
    return in_flight if arrived else sums.popleft().finish()


# A partial's strides are Inductor's to choose, as are those of what comes back.
direct_register_custom_op("boundary", _boundary, fake_impl=_boundary_shapes, target_lib=_library)
direct_register_custom_op("drain", _drain, fake_impl=_drain_shapes, target_lib=_library)
