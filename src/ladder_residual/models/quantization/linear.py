"""A frozen projection whose weight stays in memory as it is stored: adapters are trained on top of it (QLoRA), the
CUDA engine packs it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from ..parameters import stored_tensors
from ..sharding import ShardSpec
from .checkpoint import QuantizedCheckpoint
from .layout import Layout


class _FrozenProduct(torch.autograd.Function):
    """``input @ weight.T + bias``, both frozen. Backward dequantises the weight again: autograd would keep it until then."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, module: QuantizedLinear) -> Tensor:
        ctx.module, ctx.dtype = module, input.dtype
        bias = None if module.bias is None else module.bias.to(input.dtype)
        return F.linear(input, module.dequantised(input.dtype), bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,) = gradients
        return (gradient @ ctx.module.dequantised(gradient.dtype)).to(ctx.dtype), None


class QuantizedLinear(nn.Linear):
    """A module of a built model gets this class from ``hold_quantised``. Its parts are no buffers: DDP would send them in each step,
    checkpoints of a run would hold them, and a cast of the model would change them."""

    parts: dict[str, Tensor]
    layout: Layout
    compute_dtype: torch.dtype

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """A dequantised copy, for whoever asks for its shape, device or dtype."""
        return self.dequantised(self.compute_dtype)

    def dequantised(self, dtype: torch.dtype) -> Tensor:
        return self.layout.dequantise(self.parts).to(dtype)

    def forward(self, input: Tensor) -> Tensor:
        product: Tensor = _FrozenProduct.apply(input, self)
        return product

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self.layout.spec.describe()}"


def holds_quantised(model: nn.Module) -> bool:
    return any(isinstance(module, QuantizedLinear) for module in model.modules())


def memory_held(model: nn.Module) -> str | None:
    """Which weights stay as they are stored, and what they take; None if there are none."""
    held = [module for module in model.modules() if isinstance(module, QuantizedLinear)]
    if not held:
        return None
    stored = sum(part.nbytes for module in held for part in module.parts.values())
    plain = sum(module.in_features * module.out_features * module.compute_dtype.itemsize for module in held)
    dtype = str(held[0].compute_dtype).removeprefix("torch.")
    return f"{len(held)} weights stay in {held[0].layout.spec.describe()}: {stored / 2**20:,.1f} MiB, {plain / 2**20:,.1f} MiB in {dtype}"


def hold_quantised(
    model: PreTrainedModel,
    checkpoint: QuantizedCheckpoint,
    device: torch.device,
    dtype: torch.dtype,
    shard: Callable[[str, tuple[int, ...]], ShardSpec | None],
) -> list[str]:
    """Give the projections of ``model`` (on the meta device) the weights of ``checkpoint`` as they are stored, of each what ``shard``
    says of its name and shape. Returns the names of the quantised weights that are left: experts, which transformers stacks, and the
    head, whose weight the loss uses."""
    left, head = dict.fromkeys(checkpoint.weights), model.get_output_embeddings()
    for path, module in model.named_modules():
        if type(module) is not nn.Linear or module is head:
            continue
        shape = (module.out_features, module.in_features)
        (stored, _), *rest = stored_tensors(checkpoint, f"{path}.weight", shape)
        if rest or stored not in left:
            continue
        spec = shard(f"{path}.weight", shape)
        parts = {part: tensor.to(device) for part, tensor in checkpoint.read_parts(stored, spec).items()}
        del module._parameters["weight"], left[stored]
        module.__class__ = QuantizedLinear
        assert isinstance(module, QuantizedLinear)
        module.out_features, module.in_features = spec.local_shape(shape) if spec else shape
        module.parts, module.layout, module.compute_dtype = parts, checkpoint.layout, dtype
    return list(left)
