"""Muon for the matrices inside the layers, AdamW for everything else (embedding, head, norms), as one optimizer.

Muon replaces a matrix's momentum by the nearest matrix with orthonormal rows or columns, found by a few Newton-Schulz steps, so
all directions of the update have the same size. Updates are scaled to the size AdamW's would have, so both share one learning rate.
``torch.optim.Muon`` makes the same update matrix by matrix: 6,002 kernels a step for the 210 matrices of a 135M model. Here matrices
of one shape are one batch, 202 kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..models.hf import decoder_layers
from .settings import AdaptSettings

_STEPS = 5
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the quintic that drives singular values towards 1 fastest
_ADAMW_SIZE = 0.2  # root mean square of an AdamW update, in units of the learning rate


def orthogonalised(batch: Tensor) -> Tensor:
    """``[n, rows, columns]``: each matrix with its singular values moved close to 1."""
    a, b, c = _COEFFICIENTS
    x = batch.bfloat16() if batch.is_cuda else batch.float()
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp_min(1e-7)
    for _ in range(_STEPS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


class MuonWithAdamW(torch.optim.Optimizer):
    """Parameter groups with ``muon=True`` hold matrices; the others are AdamW's, fused on CUDA."""

    def __init__(self, groups: list[dict[str, Any]], lr: float, betas: tuple[float, float], momentum: float = 0.95) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "momentum": momentum, "weight_decay": 0.0, "muon": False})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if group["muon"]:
                self._muon(parameters, group)
            elif parameters:
                self._adamw(parameters, group)
        return loss

    def _muon(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        by_shape: dict[tuple[int, ...], list[Tensor]] = {}
        for parameter in parameters:
            by_shape.setdefault(tuple(parameter.shape), []).append(parameter)
        for shape, alike in by_shape.items():
            for parameter in alike:
                if "momentum" not in self.state[parameter]:
                    self.state[parameter]["momentum"] = torch.zeros_like(parameter)
            buffers = [self.state[parameter]["momentum"] for parameter in alike]
            gradients: Any = [parameter.grad for parameter in alike]
            torch._foreach_lerp_(buffers, gradients, 1 - group["momentum"])
            ahead = torch._foreach_lerp(gradients, buffers, group["momentum"])  # Nesterov
            update = orthogonalised(torch.stack(ahead))
            size = _ADAMW_SIZE * max(shape) ** 0.5
            if group["weight_decay"]:
                torch._foreach_mul_(alike, 1 - group["lr"] * group["weight_decay"])
            torch._foreach_add_(alike, list(update.to(alike[0].dtype).unbind()), alpha=-group["lr"] * size)

    def _adamw(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        means, squares, steps = [], [], []
        for parameter in parameters:
            state = self.state[parameter]
            if not state:
                state["mean"] = torch.zeros_like(parameter)
                state["square"] = torch.zeros_like(parameter)
                state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            means.append(state["mean"])
            squares.append(state["square"])
            steps.append(state["step"])
        gradients: Any = [parameter.grad for parameter in parameters]
        torch.optim._functional.adamw(
            parameters,
            gradients,
            means,
            squares,
            [],
            steps,
            foreach=False,
            fused=parameters[0].is_cuda,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=1e-8,
            maximize=False,
        )


def muon_with_adamw(model: PreTrainedModel, settings: AdaptSettings) -> MuonWithAdamW:
    matrices = [p for layer in decoder_layers(model) for p in layer.parameters() if p.dim() == 2 and p.requires_grad]
    chosen = {id(parameter) for parameter in matrices}
    rest = [parameter for parameter in model.parameters() if id(parameter) not in chosen and parameter.requires_grad]
    groups = [
        {"params": matrices, "muon": True, "weight_decay": settings.weight_decay},
        {"params": rest, "muon": False, "weight_decay": 0.0, "lr": settings.learning_rate * settings.other_rate},
    ]
    return MuonWithAdamW(groups, settings.learning_rate, (settings.beta1, settings.beta2))
