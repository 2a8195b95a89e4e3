"""Losses straight from the last hidden states: logits exist for one chunk of tokens at a time.

At 50 k words the float32 logits of a batch are larger than the model. Here each chunk's logits are turned into its loss *and* the
gradients of hidden states and head while they exist, so nothing of size [tokens, vocabulary] is kept and nothing is computed twice.
With a vocabulary sharded over tensor-parallel ranks only three numbers per token travel, not the logits.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.reduce import Reducer
from ..data.corpus_rows import IGNORE_INDEX
from .compile import own_code_object

DEFAULT_CHUNK = 4096

# (tokens of the chunk, their logits as the projection gave them, whether a gradient is wanted) -> (sums [n], gradient of the logits)
ChunkLoss = Callable[[slice, Tensor, bool], tuple[Tensor, Tensor | None]]


class Head(NamedTuple):
    """The output projection: this rank's rows of it, and what the family does to its logits."""

    weight: Tensor  # [local vocabulary, hidden]
    first: int = 0  # the word of row 0
    reducer: Reducer = Reducer()
    scaling: float = 1.0  # logits are divided by it
    softcap: float | None = None

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., local vocabulary] in float32."""
        return final_logits(hidden @ self.weight.T, self.scaling, self.softcap)


class Loss(NamedTuple):
    total: Tensor  # what to call backward on
    cross_entropy: Tensor  # the same without the z-loss, detached


def head_of(model: Any) -> Head:
    """The head of a Hugging Face causal model, whole or sharded by ``models/loading.py``."""
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
    targets = next_token_targets(labels)
    if divisor is None:
        divisor = (targets != IGNORE_INDEX).sum().clamp_min(1)
    divisor = torch.as_tensor(divisor, dtype=torch.float32, device=hidden.device)
    statistics, gradient = _kernels(compiled)

    def chunk_loss(part: slice, logits: Tensor, needs_gradient: bool) -> tuple[Tensor, Tensor | None]:
        target = targets[part]
        counts = target != IGNORE_INDEX
        local = target - head.first  # out of range: ignored, or another rank's word
        mine = statistics(logits, local, head.scaling, head.softcap)  # [chunk, 3]
        normaliser, chosen = _combine(head.reducer.gather(mine))
        sums = torch.stack([normaliser - chosen, normaliser.square()]).masked_fill(~counts, 0).sum(-1)
        if not needs_gradient:
            return sums, None
        return sums, gradient(logits, local, normaliser, counts / divisor, z_loss, head.scaling, head.softcap)

    total, (entropy, _) = chunked_loss(hidden, head.weight, chunk_loss, torch.stack([1 / divisor, z_loss / divisor]), chunk)
    return Loss(total, entropy / divisor)


def chunked_loss(hidden: Tensor, weight: Tensor, chunk_loss: ChunkLoss, weights: Tensor, chunk: int) -> tuple[Tensor, Tensor]:
    """``(loss, sums)``: the sums [n] of ``chunk_loss`` over all chunks of ``hidden``, detached, and their ``weights``-weighted sum,
    which backward can be called on. The logits of a chunk are ``hidden @ weight.T``."""
    flat = hidden.reshape(-1, hidden.shape[-1])
    needs_gradient = torch.is_grad_enabled() and (flat.requires_grad or weight.requires_grad)
    return _ChunkedLoss.apply(flat, weight, chunk_loss, weights, chunk, needs_gradient)


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *given: Any) -> Any:
        hidden, weight, chunk_loss, weights, chunk, needs_gradient = given
        device = hidden.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
        matrix = weight.detach().to(dtype)
        hidden_gradient = torch.empty_like(hidden) if needs_gradient else None
        weight_gradient = torch.zeros_like(matrix, dtype=torch.float32) if needs_gradient and ctx.needs_input_grad[1] else None
        sums = torch.zeros_like(weights)
        with torch.autocast(device, enabled=False):
            for start in range(0, len(hidden), chunk):
                part = slice(start, start + chunk)
                rows = hidden.detach()[part].to(dtype)  # [chunk, hidden]
                part_sums, slope = chunk_loss(part, rows @ matrix.T, needs_gradient)
                sums += part_sums
                if hidden_gradient is not None:
                    hidden_gradient[part] = slope @ matrix
                if weight_gradient is not None:
                    weight_gradient += slope.T @ rows
        if needs_gradient:
            ctx.save_for_backward(hidden_gradient, None if weight_gradient is None else weight_gradient.to(weight.dtype))
        ctx.mark_non_differentiable(sums)
        return sums @ weights, sums

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        hidden_gradient, weight_gradient = ctx.saved_tensors
        return hidden_gradient * grads[0], None if weight_gradient is None else weight_gradient * grads[0], *(None,) * 4


def next_token_targets(labels: Tensor) -> Tensor:
    """[batch * tokens]: position t is to predict token t + 1; the last one has nothing to predict."""
    return torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], IGNORE_INDEX)], dim=1).reshape(-1)


def final_logits(logits: Tensor, scaling: float, softcap: float | None) -> Tensor:
    """Logits in float32 after what some families do to them."""
    logits = logits.float() if scaling == 1.0 else logits.float() / scaling
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def through_final_logits(gradient: Tensor, final: Tensor, scaling: float, softcap: float | None) -> Tensor:
    """The backward of ``final_logits``, from its result."""
    if softcap is not None:
        gradient = gradient * (1 - (final / softcap).square())
    return gradient if scaling == 1.0 else gradient / scaling


def _statistics(logits: Tensor, local: Tensor, scaling: float, softcap: float | None) -> Tensor:
    """Of every token: the largest logit here, the sum of exponentials relative to it, and the target's logit if it is here."""
    logits = final_logits(logits, scaling, softcap)
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
    final = final_logits(logits, scaling, softcap)
    slope = (final - normaliser[:, None]).exp()
    if z_loss:
        slope = slope * (1 + 2 * z_loss * normaliser)[:, None]
    words = torch.arange(logits.shape[-1], device=logits.device)
    slope = slope - (words[None, :] == local[:, None]).float()
    return through_final_logits(slope * share[:, None], final, scaling, softcap).to(logits.dtype)


@cache
def _kernels(compiled: bool) -> tuple[Any, Any]:
    if not compiled:
        return _statistics, _gradient
    return tuple(torch.compile(own_code_object(function), dynamic=False) for function in (_statistics, _gradient))  # type: ignore[return-value]
