"""The opaque ops between two modules: start this module's all-reduce, wait for those that are due, add, norm.

One op, not several. Inductor moves separate start and wait ops together (nothing overlaps any more), and with functional
collectives it reads a buffer before the wait that belongs to it (wrong text, no error). An op it cannot look into it can neither
split nor move: the next module reads the op's output, and the op after it reads the stream this one returns.

``in_flight`` are the partials whose all-reduces are in flight, oldest first. The op finds the all-reduces themselves in the
process's ``Communicator``; it takes the partials so that nobody reuses their memory before.
"""

from __future__ import annotations

from torch import Tensor
from torch.library import Library
from vllm import ir
from vllm.utils.torch_utils import direct_register_custom_op

from .communicator import communicator

_library = Library("ladder_residual", "FRAGMENT")  # the ops live as long as it does


def _boundary(
    partial: Tensor,
    in_flight: list[Tensor],
    stream: Tensor,
    weight: Tensor,
    epsilon: float,
    after: list[Tensor],
    keep: int,
    arrived: bool,
    own_joined: bool,
    own_first: bool,
    next_is_attention: bool,
) -> tuple[Tensor, Tensor]:
    """What the next module reads, normed, and the stream.

    ``keep``: how many all-reduces stay in flight. ``arrived``: the one in ``in_flight`` is reduced already (it comes from another
    stage). ``own_joined``: this rank's part of those in flight is in the stream. ``own_first``: this partial joins it now. ``after``:
    weights of the post-norms of the partials that are not reduced yet; none in a family without.
    """
    _start(partial, in_flight, arrived, next_is_attention)
    partials = [*in_flight, partial]
    joined = stream + partial if own_first else stream
    for index in range(len(partials) - keep):
        joined = joined + _output(
            partials, index, after, epsilon, arrived and index == 0, own_joined and index < len(in_flight)
        )
    if not keep:
        communicator().drain()
    if joined is stream:
        joined = stream.clone()
    return ir.ops.rms_norm(joined, weight, epsilon), joined


def _boundary_shapes(
    partial: Tensor,
    in_flight: list[Tensor],
    stream: Tensor,
    weight: Tensor,
    epsilon: float,
    after: list[Tensor],
    keep: int,
    arrived: bool,
    own_joined: bool,
    own_first: bool,
    next_is_attention: bool,
) -> tuple[Tensor, Tensor]:
    return stream.new_empty(stream.shape), stream.new_empty(stream.shape)


def _drain(
    partial: Tensor,
    in_flight: list[Tensor],
    stream: Tensor,
    epsilon: float,
    after: list[Tensor],
    arrived: bool,
    own_joined: bool,
) -> tuple[Tensor, Tensor]:
    """The end of a stage: the output of its last module, and the stream without it. Nothing stays in flight."""
    _start(partial, in_flight, arrived, next_is_attention=False)
    partials = [*in_flight, partial]
    joined = stream
    for index in range(len(in_flight)):
        joined = joined + _output(partials, index, after, epsilon, arrived and index == 0, own_joined)
    latest = _output(partials, len(in_flight), after, epsilon, False, False)
    communicator().drain()
    return latest.clone() if latest is partial else latest, stream.clone() if joined is stream else joined


def _drain_shapes(
    partial: Tensor,
    in_flight: list[Tensor],
    stream: Tensor,
    epsilon: float,
    after: list[Tensor],
    arrived: bool,
    own_joined: bool,
) -> tuple[Tensor, Tensor]:
    return partial.new_empty(partial.shape), stream.new_empty(stream.shape)


def _start(partial: Tensor, in_flight: list[Tensor], arrived: bool, next_is_attention: bool) -> None:
    here = communicator()
    if arrived or not in_flight:
        here.in_flight.clear()  # nothing of this pass is in flight yet; left over only if an earlier one failed
    here.start(partial, next_is_attention=next_is_attention)


def _output(partials: list[Tensor], index: int, after: list[Tensor], epsilon: float, arrived: bool, own_joined: bool) -> Tensor:
    """What the oldest of the partials still adds to the stream."""
    if arrived:
        return partials[index]
    reduced = communicator().wait_for_oldest()
    if own_joined:
        reduced = reduced - partials[index]
    # Counted from the end: what arrived from another stage has no weight here.
    return ir.ops.rms_norm(reduced, after[index - len(partials)], epsilon) if after else reduced


# A partial's strides are Inductor's to choose, as are those of what comes back.
direct_register_custom_op("boundary", _boundary, fake_impl=_boundary_shapes, target_lib=_library)
direct_register_custom_op("drain", _drain, fake_impl=_drain_shapes, target_lib=_library)
