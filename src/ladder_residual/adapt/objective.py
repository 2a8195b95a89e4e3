"""One training step's loss, computed inside the student's own ``forward``.

``install_training_forward`` gives a model a ``forward`` that returns its loss. It must run there: DDP and FSDP work with what is called
through them, and FSDP gives the head its whole weight only during the call. LoRA passes the call on, so it works too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..core.wiring import State, wait_pending
from ..models.hf import decoder_layers
from ..train.loss import chunked_cross_entropy, head_of
from .distillation import LossWeights, chunked_distillation, relative_distance


class Counts(NamedTuple):
    """What a summed loss is divided by, over all ranks and accumulation steps."""

    tokens: Tensor  # not padding: compared with the teacher
    learned: Tensor  # tokens to learn from the data


class TeacherStates(NamedTuple):
    """The teacher's states of a batch: those its head reads, and those after each of the chosen layers."""

    hidden: Tensor
    after_layers: tuple[Tensor, ...] = ()


@dataclass(frozen=True)
class Objective:
    """``distill`` None is plain next-token training."""

    distill: LossWeights | None
    layers: tuple[int, ...] = ()  # whose states are matched
    autocast: torch.dtype | None = None
    compiled: bool = False


def install_training_forward(model: PreTrainedModel, objective: Objective) -> None:
    model.forward = partial(_training_forward, model, objective)


def restore_forward(model: PreTrainedModel) -> None:
    """The model's own ``forward`` again."""
    model.__dict__.pop("forward", None)


def _training_forward(
    model: PreTrainedModel,
    objective: Objective,
    *,
    input_ids: Tensor,
    labels: Tensor,
    counts: Counts,
    counted: Tensor | None = None,
    teacher: TeacherStates | None = None,
    teacher_head: Any = None,
    hidden_weight: Tensor | float = 0.0,
    **from_wrappers: Any,
) -> dict[str, Tensor]:
    """The loss, and its parts detached. ``from_wrappers`` are the empty arguments that LoRA's wrapper passes on."""
    base: Any = model.base_model
    matched = objective.layers if teacher is not None and teacher.after_layers else ()
    device = input_ids.device.type
    # Each weight is used once: a cache of their casts would only hold memory, and cannot be recorded in a CUDA graph.
    precision = torch.autocast(device, objective.autocast, enabled=objective.autocast is not None, cache_enabled=False)
    with precision, states_after(model, matched) as states:
        hidden = base(input_ids=input_ids, use_cache=False).last_hidden_state
        if objective.distill is None:
            loss = chunked_cross_entropy(hidden, head_of(model), labels, divisor=counts.learned, compiled=objective.compiled)
            return {"loss": loss.total, "cross_entropy": loss.cross_entropy}
        assert teacher is not None
        distilled = chunked_distillation(
            hidden,
            head_of(model),
            teacher.hidden,
            teacher_head,
            labels,
            objective.distill,
            counted=counted,
            tokens=counts.tokens,
            divisor=counts.learned,
            compiled=objective.compiled,
        )
    parts = {"loss": distilled.total, "divergence": distilled.divergence, "cross_entropy": distilled.cross_entropy}
    if matched:
        distance = torch.stack([relative_distance(*pair) for pair in zip(states, teacher.after_layers, strict=True)]).mean()
        share = input_ids.numel() / counts.tokens  # of this batch among those the gradient is the mean of
        parts["loss"] = parts["loss"] + hidden_weight * share * distance
        parts["distance"] = distance.detach() * share
    return parts


def install_teacher_forward(model: PreTrainedModel) -> None:
    """A ``forward`` that returns ``TeacherStates`` instead of logits."""
    model.forward = partial(_teacher_forward, model)


def _teacher_forward(model: PreTrainedModel, *, input_ids: Tensor, layers: Sequence[int] = ()) -> TeacherStates:
    base: Any = model.base_model
    with states_after(model, layers) as states:
        hidden = base(input_ids=input_ids, use_cache=False).last_hidden_state
    return TeacherStates(hidden, tuple(states))


@contextmanager
def states_after(model: PreTrainedModel, layers: Sequence[int]) -> Iterator[list[Tensor]]:
    """Collects the whole residual stream after each of ``layers``: all-reduces that a rewired layer leaves in flight are waited for."""
    found: list[Tensor] = []

    def keep(module: nn.Module, inputs: Any, output: Any) -> None:
        if isinstance(output, State):
            output = wait_pending(output).stream
        found.append(output[0] if isinstance(output, tuple) else output)

    stack = decoder_layers(model)
    hooks = [stack[layer].register_forward_hook(keep) for layer in sorted(set(layers))]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()
