"""AdamW on this rank's shards, and the norm of the gradient over the whole mesh."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..models.chunks import chunks_of, local_of
from ..models.sharding import ShardSpec
from ..train.gradients import finish_gradients
from .layout import Layout
from .model import ModelWithLoss
from .recipe import Optimizer


class ShardedAdamW:
    """Works on the local shards as plain tensors: no dispatch through DTensor, and the same code for every layout."""

    def __init__(self, trained: ModelWithLoss, settings: Optimizer, layout: Layout) -> None:
        self.model, self.settings, self.layout = trained.model, settings, layout
        self.parameters = dict(trained.model.named_parameters())
        self.shards = {name: local_of(parameter) for name, parameter in self.parameters.items()}
        decayed: list[Tensor] = []
        others: list[Tensor] = []
        for name, shard in self.shards.items():
            if shard.numel():
                decays = settings.decay_norms_and_embeddings or _is_matrix(name, self.parameters[name])
                (decayed if decays else others).append(shard)
        rates = ((decayed, settings.weight_decay), (others, 0.0))
        groups = [{"params": shards, "weight_decay": rate} for shards, rate in rates if shards]
        self.adamw = torch.optim.AdamW(groups, lr=settings.lr, betas=settings.betas, eps=settings.eps, fused=True)

    def step(self, lr: float) -> Tensor:
        """Finish the gradients, clip, update, clear. Returns the norm before clipping."""
        finish_gradients(self.model, self.layout.tensor)
        gradients = {
            name: local_of(parameter.grad) for name, parameter in self.parameters.items() if parameter.grad is not None
        }
        norm = self.gradient_norm(gradients)
        if self.settings.clip:
            scale = (self.settings.clip / (norm + 1e-6)).clamp(max=1.0)
            torch._foreach_mul_(list(gradients.values()), scale)
        for name, gradient in gradients.items():
            self.shards[name].grad = gradient
        for group in self.adamw.param_groups:
            group["lr"] = lr
        self.adamw.step()
        for name, parameter in self.parameters.items():
            self.shards[name].grad = parameter.grad = None
        return norm

    def gradient_norm(self, gradients: dict[str, Tensor]) -> Tensor:
        """Of the whole model: every number once, though several ranks hold norms and replicated KV heads alike."""
        specs: dict[str, ShardSpec | None] = self.model.shard_specs  # type: ignore[assignment]
        by_copies: dict[int, list[Tensor]] = {}
        for name, gradient in gradients.items():
            for chunk in chunks_of(self.parameters[name], specs[name], self.layout.tp):
                by_copies.setdefault(chunk.copies, []).append(chunk.of(gradient))
        total = torch.zeros((), device=self.layout.device)
        for copies, parts in by_copies.items():
            norms = torch._foreach_norm(parts)
            total += torch.stack(norms).square().sum() / copies
        return self.layout.all_reduce(total).sqrt()

    def state(self) -> dict[str, dict[str, Tensor]]:
        """``{"exp_avg": {parameter: shard}, "exp_avg_sq": ...}``, made if no step was taken yet."""
        moments: dict[str, dict[str, Tensor]] = {"exp_avg": {}, "exp_avg_sq": {}}
        for name, shard in self.shards.items():
            state = self.adamw.state[shard] if shard.numel() else {}
            for key, tensors in moments.items():
                if key not in state:
                    state[key] = torch.zeros_like(shard)
                tensors[name] = state[key]
        return moments

    def set_steps(self, steps: int) -> None:
        """As after ``steps`` updates, once the moments are loaded."""
        for shard in self.shards.values():
            if shard.numel():
                self.adamw.state[shard]["step"] = torch.tensor(float(steps), device=shard.device)


def _is_matrix(name: str, parameter: Any) -> bool:
    return parameter.dim() > 1 and not any(part in name for part in ("embed_tokens", "embed_in"))
