"""Several tensor-parallel ranks computed by one process, for wirings whose function depends on the number of ranks.

With desync and delayed wirings each rank keeps a stream of its own, so training them on one GPU means computing what N ranks would:
here the N streams are stacked in the batch dim, [ranks * batch, tokens, hidden]. Every projection becomes N smaller ones (a batched
GEMM, the same FLOPs), each on its rank's slice of the *whole* weights; an all-reduce is a sum over that dim. ``core/wiring.py`` is
used as it is, and checkpoints hold the ordinary weights. On one rank without this, delayed and desync are just standard.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..core.reduce import Pending, Reducer
from ..models.families import family_of
from ..models.hf import set_reducer
from ..models.hf_config import wiring_of
from ..models.presets import ModelShape
from ..models.sharding import check_divides, shard_of


class StackedReducer(Reducer):
    """The all-reduce of ranks whose partials lie one after the other in the batch dim; every rank gets it."""

    def __init__(self, ranks: int) -> None:
        self.size = ranks

    def start(self, partial: Tensor) -> Pending:
        each = partial.unflatten(0, (self.size, -1))
        return super().start(each.sum(0, keepdim=True).expand_as(each).flatten(0, 1))


class _StackedLinear(nn.Linear):
    """Each rank's input times its own part of the weight: of output rows (``dim`` 0), or of input columns (1), which gives a partial."""

    ranks: int
    dim: int

    def forward(self, input: Tensor) -> Tensor:
        x = input.unflatten(0, (self.ranks, -1)).flatten(1, -2)  # [ranks, batch * tokens, in of a rank]
        weight = self.weight.unflatten(self.dim, (self.ranks, -1)).movedim(self.dim, 0)  # [ranks, out of a rank, in of a rank]
        out = torch.bmm(x, weight.transpose(1, 2))
        if self.bias is not None and self.dim == 0:
            out = out + self.bias.unflatten(0, (self.ranks, 1, -1))
        elif self.bias is not None:  # added once, by rank 0
            first = torch.arange(self.ranks, device=out.device)[:, None, None] == 0
            out = out + self.bias * first
        return out.reshape(*input.shape[:-1], -1)


def emulate_ranks(model: PreTrainedModel, ranks: int) -> PreTrainedModel:
    """Let a whole, rewired model compute what ``ranks`` tensor-parallel ranks would, in place. For training and loss, not for caches."""
    config = model.config.to_dict()
    family, shape = family_of(config), ModelShape.from_hf(config)
    check_divides(shape, family, ranks)
    if shape.num_kv_heads % ranks:
        raise ValueError(f"{ranks} emulated ranks do not divide the {shape.num_kv_heads} KV heads; use a divisor of them")
    wiring_of(model.config).check_tp(ranks)
    base: Any = model.base_model
    for name, module in base.layers.named_modules():
        for leaf, parameter in module.named_parameters(recurse=False):
            _check_known(f"layers.{name}.{leaf}", module, parameter, shape, ranks)
        if isinstance(module, nn.Linear):
            _stack(name, module, shape, ranks)
    set_reducer(model, StackedReducer(ranks))
    base.get_input_embeddings().register_forward_hook(lambda module, args, out: torch.cat([out] * ranks))
    norm = getattr(base, "norm", None) or base.final_layer_norm
    # After the last layer all ranks hold the same stream; the head needs one of them.
    norm.register_forward_pre_hook(lambda module, args: (args[0][: len(args[0]) // ranks],))
    model.emulated_ranks = ranks  # type: ignore[assignment]
    return model


def _check_known(name: str, module: nn.Module, parameter: Tensor, shape: ModelShape, ranks: int) -> None:
    """Everything a rank would hold a part of must be sharded here too, in one range per rank."""
    spec = shard_of(name, tuple(parameter.shape), shape, ranks, 0)
    if spec is not None and (not isinstance(module, nn.Linear) or len(spec.ranges) > 1):
        raise ValueError(
            f"emulated ranks need projections sharded in one range per rank, but {name} is not: use real ranks (parallel.tp)"
        )


def _stack(name: str, module: Any, shape: ModelShape, ranks: int) -> None:
    spec = shard_of(f"layers.{name}.weight", tuple(module.weight.shape), shape, ranks, 0)
    if spec is not None:  # a router is whole on every rank
        module.__class__ = _StackedLinear
        module.ranks, module.dim = ranks, spec.dim
