"""From a model to a parallel one. The order of the steps is written once, here, for training and for adaptation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import PreTrainedModel

from ..core.reduce import Reducer
from ..models.families import family_of
from ..models.hf import decoder_layers
from ..models.loading import set_reducers
from .compile import compile_layers
from .emulated_ranks import emulate_ranks


def parallelize(
    model: PreTrainedModel,
    *,
    root: nn.Module | None = None,
    reducer: Reducer | None = None,
    emulated_ranks: int = 1,
    checkpoint_activations: bool = False,
    compile_options: Mapping[str, Any] | None = None,
    data_mesh: DeviceMesh | None = None,
    compute_dtype: torch.dtype | None = None,
) -> None:
    """TP, activation checkpointing, compile, FSDP2, in place. ``model`` already holds this tensor-parallel rank's weights.

    ``root`` is the module that is called (default: the model); ``compile_options`` are those of ``compile_layers`` (None: eager); over
    ``data_mesh`` weights and optimizer are sharded (None: not), and forward and backward use ``compute_dtype``.
    """
    # 1. Tensor parallelism: the reducer its layers use, or several ranks' computation in this process.
    if emulated_ranks > 1:
        emulate_ranks(model, emulated_ranks)
    elif reducer is not None:
        set_reducers(model, reducer)
    # 2. Activation checkpointing: what is recomputed lies outside of what is compiled.
    if checkpoint_activations:
        model.gradient_checkpointing_enable()
    # 3. Compile the modules of a layer, before FSDP puts its hooks around the layer.
    if compile_options is not None:
        compile_layers(model, **compile_options)
    # 4. FSDP2: a group per layer, and one for embedding, last norm and head.
    if data_mesh is not None:
        _shard(model, root or model, data_mesh, compute_dtype)


def _shard(model: PreTrainedModel, root: nn.Module, mesh: DeviceMesh, compute_dtype: torch.dtype | None) -> None:
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    # A post-norm is applied by the next layer, after the all-reduce: its weight must still be there.
    reshard = mesh.size() > 1 and not family_of(model.config.to_dict()).post_norm
    for layer in decoder_layers(model):
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    # The rest stays gathered after its forward: the loss uses the head, of a teacher too, after the model is through.
    fully_shard(root, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
