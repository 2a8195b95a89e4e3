"""The opaque ops between two modules: start this module's all-reduce, wait for those that are due, add, norm.

One op, not several. Inductor moves separate start and wait ops together (nothing overlaps any more), and with functional
collectives it reads a buffer before the wait that belongs to it (wrong text, no error). An op it cannot look into it can neither
split nor move: the next module reads the op's output, and the op after it reads the stream this one returns.

``in_flight`` are the partials whose all-reduces are in flight, oldest first. The op finds the all-reduces themselves in the
process's ``Communicator``; it takes the partials so that nobody reuses their memory before.

On CUDA all that joins the stream does so in the norm's kernel (``engine/kernels/join.py``); elsewhere in torch, op by op.
"""

from __future__ import annotations

from typing import NamedTuple

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
    offset: float,
    after: list[Tensor],
    keep: int,
    arrived: bool,
    own_joined: bool,
    own_first: bool,
    next_is_attention: bool,
) -> tuple[Tensor, Tensor]:
    """What the next module reads, normed, and the stream. Something joins it: an op must not return what it was given.

    ``offset``: what norm weights are stored without. ``keep``: how many all-reduces stay in flight. ``arrived``: the one in ``in_flight``
    is reduced already (it comes from another stage). ``own_joined``: this rank's part of those in flight is in the stream. ``own_first``:
    this partial joins it now. ``after``: weights of the post-norms of the partials that are not reduced yet; none in a family without.
    """
    _start(partial, in_flight, arrived, next_is_attention)
    partials = [*in_flight, partial]
    terms = [Term(partial)] if own_first else []
    for index in range(len(partials) - keep):
        terms += _output(partials, index, after, arrived and index == 0, own_joined and index < len(in_flight))
    if not keep:
        communicator().drain()
    join = norm_in_one_kernel if stream.is_cuda else norm_slowly
    return join(stream, terms, weight, epsilon, offset)


def _begin(
    partial: Tensor,
    in_flight: list[Tensor],
    stream: Tensor,
    weight: Tensor,
    epsilon: float,
    offset: float,
    arrived: bool,
    next_is_attention: bool,
) -> Tensor:
    """A boundary where nothing joins the stream: what the next module reads."""
    _start(partial, in_flight, arrived, next_is_attention)
    join = norm_in_one_kernel if stream.is_cuda else norm_slowly
    return join(stream, [], weight, epsilon, offset)[0]


def _drain(
    partial: Tensor,
    in_flight: list[Tensor],
    stream: Tensor,
    epsilon: float,
    offset: float,
    after: list[Tensor],
    arrived: bool,
    own_joined: bool,
) -> tuple[Tensor, Tensor]:
    """The end of a stage: the output of its last module, and the stream without it. Nothing stays in flight."""
    _start(partial, in_flight, arrived, next_is_attention=False)
    partials = [*in_flight, partial]
    joined = stream
    for index in range(len(in_flight)):
        for term in _output(partials, index, after, arrived and index == 0, own_joined):
            joined = _joined(joined, term, epsilon, offset)
    (last,) = _output(partials, len(in_flight), after, False, False)
    latest = last.output if last.norm is None else rms_norm(last.output, last.norm, epsilon, offset)
    communicator().drain()
    return latest.clone() if latest is partial else latest, stream.clone() if joined is stream else joined


class Term(NamedTuple):
    """What joins the stream: a module's output, or less it, or normed by a post-norm."""

    output: Tensor
    subtracted: bool = False
    norm: Tensor | None = None


def _start(partial: Tensor, in_flight: list[Tensor], arrived: bool, next_is_attention: bool) -> None:
    here = communicator()
    if arrived or not in_flight:
        here.in_flight.clear()  # nothing of this pass is in flight yet; left over only if an earlier one failed
    here.start(partial, next_is_attention=next_is_attention)


def _output(partials: list[Tensor], index: int, after: list[Tensor], arrived: bool, own_joined: bool) -> list[Term]:
    """What the oldest of the partials still adds to the stream."""
    if arrived:
        return [Term(partials[index])]
    reduced = communicator().wait_for_oldest()
    # Counted from the end: what arrived from another stage has no weight here.
    terms = [Term(reduced, norm=after[index - len(partials)] if after else None)]
    return [*terms, Term(partials[index], subtracted=True)] if own_joined else terms


def rms_norm(x: Tensor, weight: Tensor, epsilon: float, offset: float) -> Tensor:
    return ir.ops.rms_norm(x, weight.float() + offset if offset else weight, epsilon)


def _joined(stream: Tensor, term: Term, epsilon: float, offset: float) -> Tensor:
    output = term.output if term.norm is None else rms_norm(term.output, term.norm, epsilon, offset)
    return stream - output if term.subtracted else stream + output


def norm_slowly(stream: Tensor, terms: list[Term], weight: Tensor, epsilon: float, offset: float) -> tuple[Tensor, Tensor]:
    """In torch, op by op."""
    for term in terms:
        stream = _joined(stream, term, epsilon, offset)
    return rms_norm(stream, weight, epsilon, offset), stream


def norm_in_one_kernel(
    stream: Tensor, terms: list[Term], weight: Tensor, epsilon: float, offset: float
) -> tuple[Tensor, Tensor]:
    """The same in one kernel, summed in float32."""
    from ..engine.kernels.join import ADD, ADD_NORMED, MAX_TERMS, SUBTRACT, norm_after_joining

    while len(terms) > MAX_TERMS:  # where a delayed wiring's layers end
        stream, terms = _joined(stream, terms[0], epsilon, offset), terms[1:]
    kinds = [SUBTRACT.value if term.subtracted else ADD.value if term.norm is None else ADD_NORMED.value for term in terms]
    joining = [(term.output, kind, term.norm) for term, kind in zip(terms, kinds, strict=True)]
    return norm_after_joining(stream, joining, weight, epsilon, offset)


def _shapes_of_two(partial: Tensor, in_flight: list[Tensor], stream: Tensor, *others: object) -> tuple[Tensor, Tensor]:
    return partial.new_empty(partial.shape), stream.new_empty(stream.shape)


def _shape_of_one(partial: Tensor, in_flight: list[Tensor], stream: Tensor, *others: object) -> Tensor:
    return stream.new_empty(stream.shape)


# A partial's strides are Inductor's to choose, as are those of what comes back.
direct_register_custom_op("boundary", _boundary, fake_impl=_shapes_of_two, target_lib=_library)
direct_register_custom_op("begin", _begin, fake_impl=_shape_of_one, target_lib=_library)
direct_register_custom_op("drain", _drain, fake_impl=_shapes_of_two, target_lib=_library)
