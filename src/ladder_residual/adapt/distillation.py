"""What a student learns from its teacher: the distribution of the next token, and the hidden states on the way to it.

As in ``train/loss.py`` the head is applied to one chunk of tokens at a time and the gradient of the chunk's logits is written
down in closed form while they exist. At 65,536 tokens and 49,152 words one float32 tensor of logits takes 12 GB, and autograd
would keep several of them. ``plain_distillation`` is the slow twin that autograd differentiates.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..train.compiling import own_code
from ..train.loss import DEFAULT_CHUNK, IGNORED, Head


@dataclass(frozen=True)
class Mixture:
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


def token_divergence(student: Tensor, teacher: Tensor, temperature: float = 1.0, top_k: int = 0) -> Tensor:
    """KL(teacher || student) for each row of logits, in nats, times the temperature squared (gradients keep their size)."""
    log_q = F.log_softmax(student.float() / temperature, -1)
    log_p = F.log_softmax(teacher.float() / temperature, -1)
    if not top_k:
        return (log_p.exp() * (log_p - log_q)).sum(-1) * temperature**2
    log_p_top, words = log_p.topk(min(top_k, log_p.shape[-1]), -1)
    log_q_top = log_q.gather(-1, words)
    p_rest = (1 - log_p_top.exp().sum(-1)).clamp_min(1e-9)
    q_rest = (1 - log_q_top.exp().sum(-1)).clamp_min(1e-9)
    among_top = (log_p_top.exp() * (log_p_top - log_q_top)).sum(-1)
    return (among_top + p_rest * (p_rest.log() - q_rest.log())) * temperature**2


def plain_distillation(
    hidden: Tensor, head: Head, teacher_hidden: Tensor, teacher_head: Head, labels: Tensor, mixture: Mixture
) -> Distillation:
    """The definition; shapes as in ``chunked_distillation``."""
    logits = final_logits(hidden @ head.weight.T, head)
    teacher = final_logits(teacher_hidden @ teacher_head.weight.T, teacher_head)
    divergence = token_divergence(logits, teacher, mixture.temperature, mixture.top_k).mean()
    entropy = F.cross_entropy(logits.flatten(0, 1), _shifted(labels), ignore_index=IGNORED)
    return Distillation(mixture.teacher * divergence + mixture.data * entropy, divergence.detach(), entropy.detach())


def chunked_distillation(
    hidden: Tensor,
    head: Head,
    teacher_hidden: Tensor,
    teacher_head: Head,
    labels: Tensor,
    mixture: Mixture,
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
    targets = _shifted(labels)
    weights = None if counted is None else counted.reshape(-1).float()
    if tokens is None:
        tokens = targets.numel() if weights is None else weights.sum().clamp_min(1)
    if divisor is None:
        divisor = (targets != IGNORED).sum().clamp_min(1)
    divisors = tuple(torch.as_tensor(value, dtype=torch.float32, device=hidden.device) for value in (tokens, divisor))
    flat, teacher_flat = hidden.reshape(-1, hidden.shape[-1]), teacher_hidden.reshape(-1, teacher_hidden.shape[-1])
    needs_gradient = torch.is_grad_enabled() and (flat.requires_grad or head.weight.requires_grad)
    options = (head, teacher_flat, teacher_head, targets, weights, mixture, divisors, chunk, compiled, needs_gradient)
    return Distillation(*_ChunkedDistillation.apply(flat, head.weight, options))


class _ChunkedDistillation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, options: Any) -> Any:
        head, teacher_hidden, teacher_head, targets, weights, mixture, divisors, chunk, compiled, needs_gradient = options
        rule = _rule(compiled, mixture, (head.scaling, head.softcap), (teacher_head.scaling, teacher_head.softcap))
        device = hidden.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
        matrix, teacher_matrix = weight.detach().to(dtype), teacher_head.weight.detach()
        hidden_gradient = torch.empty_like(hidden) if needs_gradient else None
        weight_gradient = torch.zeros_like(matrix, dtype=torch.float32) if needs_gradient and ctx.needs_input_grad[1] else None
        divergence = torch.zeros((), dtype=torch.float32, device=hidden.device)
        entropy = torch.zeros_like(divergence)
        with torch.autocast(device, enabled=False):
            for start in range(0, len(targets), chunk):
                rows = hidden.detach()[start : start + chunk].to(dtype)  # [chunk, hidden]
                teacher_rows = teacher_hidden[start : start + chunk].to(teacher_matrix.dtype)
                weight_part = None if weights is None else weights[start : start + chunk]
                slope, divergences, entropies = rule(
                    rows @ matrix.T, teacher_rows @ teacher_matrix.T, targets[start : start + chunk], weight_part, *divisors
                )
                divergence += divergences
                entropy += entropies
                if hidden_gradient is not None:
                    hidden_gradient[start : start + chunk] = slope @ matrix
                if weight_gradient is not None:
                    weight_gradient += slope.T @ rows
        if needs_gradient:
            ctx.save_for_backward(hidden_gradient, None if weight_gradient is None else weight_gradient.to(weight.dtype))
        divergence, entropy = divergence / divisors[0], entropy / divisors[1]
        ctx.mark_non_differentiable(divergence, entropy)
        return mixture.teacher * divergence + mixture.data * entropy, divergence, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        hidden_gradient, weight_gradient = ctx.saved_tensors
        return hidden_gradient * grads[0], None if weight_gradient is None else weight_gradient * grads[0], None


def _slope_and_sums(
    mixture: Mixture,
    scaling: tuple[float, float | None],
    teacher_scaling: tuple[float, float | None],
    raw: Tensor,
    teacher_raw: Tensor,
    targets: Tensor,
    weights: Tensor | None,
    tokens: Tensor,
    divisor: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradient of the loss by the logits as the projection gave them, and the sums of KL and next-token loss of the chunk."""
    t = mixture.temperature
    logits = _final(raw, *scaling)
    log_p = F.log_softmax(_final(teacher_raw, *teacher_scaling) / t, -1)
    log_q = F.log_softmax(logits / t, -1)
    p, q = log_p.exp(), log_q.exp()
    if not mixture.top_k:
        divergences = (p * (log_p - log_q)).sum(-1)
        slope = q - p
    else:
        top = log_p >= log_p.topk(min(mixture.top_k, log_p.shape[-1]), -1).values[:, -1:]
        p_rest = (1 - (p * top).sum(-1, keepdim=True)).clamp_min(1e-9)
        q_rest = (1 - (q * top).sum(-1, keepdim=True)).clamp_min(1e-9)
        divergences = (p * (log_p - log_q) * top).sum(-1) + (p_rest * (p_rest.log() - q_rest.log()))[:, 0]
        slope = torch.where(top, q - p, q - p_rest * q / q_rest)
    slope = slope * (mixture.teacher * t / tokens)
    if weights is not None:
        slope, divergences = slope * weights[:, None], divergences * weights
    counts = targets != IGNORED
    target = torch.where(counts, targets, 0)
    log_one = log_q if t == 1 else F.log_softmax(logits, -1)
    entropy = -(log_one.gather(-1, target[:, None])[:, 0] * counts).sum()
    if mixture.data:
        words = torch.arange(logits.shape[-1], device=logits.device)
        chosen = (words[None, :] == target[:, None]).float()
        slope = slope + (log_one.exp() - chosen) * (counts * mixture.data / divisor)[:, None]
    multiplier, softcap = scaling
    if softcap is not None:
        slope = slope * (1 - (logits / softcap).square())
    return (slope / multiplier).to(raw.dtype), divergences.sum() * t**2, entropy


@cache
def _rule(compiled: bool, *fixed: Any) -> Callable[..., Any]:
    return partial(torch.compile(own_code(_slope_and_sums), dynamic=False) if compiled else _slope_and_sums, *fixed)


def final_logits(raw: Tensor, head: Head) -> Tensor:
    """Logits in float32 after what some families do to them."""
    return _final(raw, head.scaling, head.softcap)


def _final(raw: Tensor, scaling: float, softcap: float | None) -> Tensor:
    logits = raw.float() if scaling == 1.0 else raw.float() / scaling
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def _shifted(labels: Tensor) -> Tensor:
    """Position t is to predict token t + 1; the last one has nothing to predict."""
    return torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], IGNORED)], dim=1).reshape(-1)


def relative_distance(student: Tensor, teacher: Tensor) -> Tensor:
    """Mean over tokens of log(1 + |s - t|^2 / |t|^2).

    Relative to each token's own size: a few tokens of a pretrained model have states a thousand times larger than the rest, and a
    plain mean of squares would see only those. The logarithm keeps tokens that a fresh conversion throws far off from ruling all.
    """
    student, teacher = student.float(), teacher.float()
    return ((student - teacher).square().sum(-1) / teacher.square().sum(-1).clamp_min(1e-6)).log1p().mean()
