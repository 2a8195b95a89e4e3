"""What a student learns from its teacher: the distribution of the next token, and the hidden states on the way to it.

``train/loss.py`` applies the head to one chunk of tokens at a time; here the gradient of a chunk's logits is written down in closed
form. At 65,536 tokens and 49,152 words one float32 tensor of logits takes 12 GB, and autograd would keep several of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..data.corpus_rows import IGNORE_INDEX
from ..train.compile import own_code_object
from ..train.loss import DEFAULT_CHUNK, Head, chunked_loss, final_logits, next_token_targets, through_final_logits


@dataclass(frozen=True)
class LossWeights:
    """``teacher`` weighs KL(teacher || student), ``data`` the next-token loss of the text itself."""

    teacher: float = 1.0
    data: float = 0.0
    temperature: float = 1.0
    top_k: int = 0  # 0: the whole vocabulary; otherwise the teacher's k likeliest words, and everything else as one more word

    def __post_init__(self) -> None:
        if self.teacher <= 0 or self.data < 0:
            raise ValueError(
                f"the teacher's weight must be positive and the data's not negative, got {self.teacher} and {self.data}"
            )
        if not 0 < self.temperature <= 100:
            raise ValueError(f"the temperature must be above 0 and at most 100, got {self.temperature}")
        if self.top_k < 0:
            raise ValueError(f"top-k must be 0 (the whole vocabulary) or a number of words, got {self.top_k}")


class Distillation(NamedTuple):
    total: Tensor  # what to call backward on
    divergence: Tensor  # mean KL to the teacher, detached
    cross_entropy: Tensor  # mean next-token loss, detached


def chunked_distillation(
    hidden: Tensor,
    head: Head,
    teacher_hidden: Tensor,
    teacher_head: Head,
    labels: Tensor,
    weights: LossWeights,
    *,
    counted: Tensor | None = None,
    tokens: Tensor | float | None = None,
    divisor: Tensor | float | None = None,
    chunk: int = DEFAULT_CHUNK,
    compiled: bool = False,
) -> Distillation:
    """Loss of a student against its teacher, from the hidden states [batch, tokens, hidden] their heads read.

    KL counts every position (or those ``counted`` [batch, tokens] marks), next-token loss only where the label (shifted here) is
    not -100. The sums are divided by ``tokens`` and ``divisor``; by default by the numbers of this batch. Pass those of all ranks
    and accumulation steps to get their mean.
    """
    if head.reducer.size > 1:
        raise ValueError("distillation needs whole heads: shard with data parallelism or FSDP, not with tensor parallelism")
    targets = next_token_targets(labels)
    mask = None if counted is None else counted.reshape(-1).float()
    if tokens is None:
        tokens = targets.numel() if mask is None else mask.sum().clamp_min(1)
    if divisor is None:
        divisor = (targets != IGNORE_INDEX).sum().clamp_min(1)
    tokens, divisor = (torch.as_tensor(value, dtype=torch.float32, device=hidden.device) for value in (tokens, divisor))
    rule = _rule(compiled, weights, (head.scaling, head.softcap), (teacher_head.scaling, teacher_head.softcap))
    teacher_flat, teacher_matrix = teacher_hidden.reshape(-1, teacher_hidden.shape[-1]), teacher_head.weight.detach()

    def chunk_loss(part: slice, logits: Tensor, needs_gradient: bool) -> tuple[Tensor, Tensor | None]:
        teacher_logits = teacher_flat[part].to(teacher_matrix.dtype) @ teacher_matrix.T
        return rule(logits, teacher_logits, targets[part], None if mask is None else mask[part], tokens, divisor)

    shares = torch.stack([weights.teacher / tokens, weights.data / divisor])
    total, sums = chunked_loss(hidden, head.weight, chunk_loss, shares, chunk)
    return Distillation(total, sums[0] / tokens, sums[1] / divisor)


def _sums_and_gradient(
    weights: LossWeights,
    scaling: tuple[float, float | None],
    teacher_scaling: tuple[float, float | None],
    raw: Tensor,
    teacher_raw: Tensor,
    targets: Tensor,
    mask: Tensor | None,
    tokens: Tensor,
    divisor: Tensor,
) -> tuple[Tensor, Tensor]:
    """The sums of KL and next-token loss of a chunk, and the gradient of the loss by the logits as the projection gave them."""
    t = weights.temperature
    logits = final_logits(raw, *scaling)
    log_p = F.log_softmax(final_logits(teacher_raw, *teacher_scaling) / t, -1)
    log_q = F.log_softmax(logits / t, -1)
    p, q = log_p.exp(), log_q.exp()
    if not weights.top_k:
        divergences = (p * (log_p - log_q)).sum(-1)
        slope = q - p
    else:
        top = log_p >= log_p.topk(min(weights.top_k, log_p.shape[-1]), -1).values[:, -1:]
        p_rest = (1 - (p * top).sum(-1, keepdim=True)).clamp_min(1e-9)
        q_rest = (1 - (q * top).sum(-1, keepdim=True)).clamp_min(1e-9)
        divergences = (p * (log_p - log_q) * top).sum(-1) + (p_rest * (p_rest.log() - q_rest.log()))[:, 0]
        slope = torch.where(top, q - p, q - p_rest * q / q_rest)
    slope = slope * (weights.teacher * t / tokens)
    if mask is not None:
        slope, divergences = slope * mask[:, None], divergences * mask
    counts = targets != IGNORE_INDEX
    target = torch.where(counts, targets, 0)
    log_one = log_q if t == 1 else F.log_softmax(logits, -1)
    entropy = -(log_one.gather(-1, target[:, None])[:, 0] * counts).sum()
    if weights.data:
        words = torch.arange(logits.shape[-1], device=logits.device)
        chosen = (words[None, :] == target[:, None]).float()
        slope = slope + (log_one.exp() - chosen) * (counts * weights.data / divisor)[:, None]
    sums = torch.stack([divergences.sum() * t**2, entropy])
    return sums, through_final_logits(slope, logits, *scaling).to(raw.dtype)


@cache
def _rule(compiled: bool, *fixed: Any) -> Callable[..., Any]:
    function = torch.compile(own_code_object(_sums_and_gradient), dynamic=False) if compiled else _sums_and_gradient
    return partial(function, *fixed)


def relative_distance(student: Tensor, teacher: Tensor) -> Tensor:
    """Mean over tokens of log(1 + |s - t|^2 / |t|^2).

    Relative to each token's own size: a few tokens of a pretrained model have states a thousand times larger than the rest, and a
    plain mean of squares would see only those. The logarithm keeps tokens that a fresh conversion throws far off from ruling all.
    """
    student, teacher = student.float(), teacher.float()
    return ((student - teacher).square().sum(-1) / teacher.square().sum(-1).clamp_min(1e-6)).log1p().mean()
