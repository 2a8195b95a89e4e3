"""Cross entropy straight from the last hidden states: logits exist for one chunk of tokens at a time.

At 50 k words the float32 logits of a batch are larger than the model. Here each chunk's logits are turned into its loss *and* the
gradients of hidden states and head while they exist, so nothing of size [tokens, vocabulary] is kept and nothing is computed twice.
With a vocabulary cut over tensor-parallel ranks only three numbers per token travel, not the logits.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..reduce import Reducer
from .compiling import own_code

IGNORED = -100  # a label that counts for nothing, as in transformers and torch
DEFAULT_CHUNK = 4096


class Head(NamedTuple):
    """The output projection: this rank's rows of it, and what the family does to its logits."""

    weight: Tensor  # [local vocabulary, hidden]
    first: int = 0  # the word of row 0
    reducer: Reducer = Reducer()
    scaling: float = 1.0  # logits are divided by it
    softcap: float | None = None


class Loss(NamedTuple):
    total: Tensor  # what to call backward on
    cross_entropy: Tensor  # the same without the z-loss, detached


def head_of(model: Any) -> Head:
    """The head of a Hugging Face causal model, whole or cut by ``loading.py``."""
    layer, embedding, config = model.get_output_embeddings(), model.get_input_embeddings(), model.config
    if getattr(layer, "bias", None) is not None:
        raise ValueError(f"{type(model).__name__} has a bias on its logits, which the chunked loss does not know")
    return Head(
        layer.weight,
        getattr(embedding, "first", 0),
        getattr(layer, "reducer", None) or Reducer(),
        float(getattr(config, "logits_scaling", 1.0) or 1.0),
        getattr(config, "final_logit_softcapping", None),
    )


def chunked_cross_entropy(
    hidden: Tensor,
    head: Head,
    labels: Tensor,
    *,
    divisor: Tensor | float | None = None,
    z_loss: float = 0.0,
    chunk: int = DEFAULT_CHUNK,
    compiled: bool = False,
) -> Loss:
    """Next-token loss of ``hidden`` [batch, tokens, hidden] (what the head reads) against ``labels`` [batch, tokens].

    Labels are as transformers wants them: position t holds token t, the shift happens here; -100 is ignored. The sum over tokens is
    divided by ``divisor``: by default the number of labels that count here; pass the number on all ranks and accumulation steps to
    make the sum of their losses the mean over the whole batch. ``z_loss`` adds that multiple of the mean squared log-normaliser.
    """
    if chunk < 1:
        raise ValueError(f"a chunk of the loss needs at least 1 token, got {chunk}")
    targets = torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], IGNORED)], dim=1).reshape(-1)  # hidden stays as it is
    if divisor is None:
        divisor = (targets != IGNORED).sum().clamp_min(1)
    divisor = torch.as_tensor(divisor, dtype=torch.float32, device=hidden.device)
    flat = hidden.reshape(-1, hidden.shape[-1])
    needs_gradient = torch.is_grad_enabled() and (flat.requires_grad or head.weight.requires_grad)
    options = (targets, divisor, head, z_loss, chunk, compiled, needs_gradient)
    return Loss(*_ChunkedLoss.apply(flat, head.weight, options))


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, options: Any) -> Any:
        targets, divisor, head, z_loss, chunk, compiled, needs_gradient = options
        statistics, gradient = _kernels(compiled)
        device = hidden.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
        matrix = weight.detach().to(dtype)
        hidden_gradient = torch.empty_like(hidden) if needs_gradient else None
        weight_gradient = torch.zeros_like(matrix, dtype=torch.float32) if needs_gradient else None
        entropy = torch.zeros((), dtype=torch.float32, device=hidden.device)
        squares = torch.zeros_like(entropy)
        for start in range(0, len(targets), chunk):
            rows = hidden.detach()[start : start + chunk].to(dtype)  # [chunk, hidden]
            target = targets[start : start + chunk]
            counts = target != IGNORED
            local = target - head.first  # out of range: ignored, or another rank's word
            logits = rows @ matrix.T  # [chunk, local vocabulary]
            mine = statistics(logits, local, head.scaling, head.softcap)  # [chunk, 3]
            normaliser, chosen = _combine(head.reducer.gather(mine))
            entropy += (normaliser - chosen).masked_fill(~counts, 0).sum()
            if z_loss:
                squares += normaliser.square().masked_fill(~counts, 0).sum()
            if hidden_gradient is not None and weight_gradient is not None:
                share = counts / divisor
                slope = gradient(logits, local, normaliser, share, z_loss, head.scaling, head.softcap)
                hidden_gradient[start : start + chunk] = slope @ matrix
                weight_gradient += slope.T @ rows
        if needs_gradient:
            assert weight_gradient is not None
            ctx.save_for_backward(hidden_gradient, weight_gradient.to(weight.dtype))
        entropy = entropy / divisor
        total = entropy + z_loss * squares / divisor if z_loss else entropy.clone()
        ctx.mark_non_differentiable(entropy)
        return total, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        hidden_gradient, weight_gradient = ctx.saved_tensors
        return hidden_gradient * grads[0], weight_gradient * grads[0], None


def _final(logits: Tensor, scaling: float, softcap: float | None) -> Tensor:
    logits = logits.float() if scaling == 1.0 else logits.float() / scaling
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def _statistics(logits: Tensor, local: Tensor, scaling: float, softcap: float | None) -> Tensor:
    """Of every token: the largest logit here, the sum of exponentials relative to it, and the target's logit if it is here."""
    logits = _final(logits, scaling, softcap)
    largest = logits.amax(-1)
    total = (logits - largest[:, None]).exp().sum(-1)
    here = (local >= 0) & (local < logits.shape[-1])
    chosen = logits.gather(-1, local.clamp(0, logits.shape[-1] - 1)[:, None])[:, 0]
    return torch.stack([largest, total, torch.where(here, chosen, 0.0)], dim=-1)


def _combine(gathered: Tensor) -> tuple[Tensor, Tensor]:
    """Log-normaliser and target logit over the whole vocabulary, from every rank's three numbers."""
    largest, total, chosen = gathered.unflatten(-1, (-1, 3)).unbind(-1)  # each [chunk, ranks]
    top = largest.amax(-1)
    return top + (total * (largest - top[:, None]).exp()).sum(-1).log(), chosen.sum(-1)


def _gradient(
    logits: Tensor, local: Tensor, normaliser: Tensor, share: Tensor, z_loss: float, scaling: float, softcap: float | None
) -> Tensor:
    """Of the loss, with respect to the logits as the projection gave them."""
    final = _final(logits, scaling, softcap)
    slope = (final - normaliser[:, None]).exp()
    if z_loss:
        slope = slope * (1 + 2 * z_loss * normaliser)[:, None]
    words = torch.arange(logits.shape[-1], device=logits.device)
    slope = slope - (words[None, :] == local[:, None]).float()
    if softcap is not None:
        slope = slope * (1 - (final / softcap).square())
    return (slope * (share / scaling)[:, None]).to(logits.dtype)


@cache
def _kernels(compiled: bool) -> tuple[Any, Any]:
    if not compiled:
        return _statistics, _gradient
    return torch.compile(own_code(_statistics), dynamic=False), torch.compile(own_code(_gradient), dynamic=False)
