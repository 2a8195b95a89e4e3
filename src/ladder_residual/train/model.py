"""From a recipe to this rank's part of a model, ready to train."""

from __future__ import annotations

import hashlib
import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from ..core.config import RANK_DEPENDENT, Wiring
from ..models.chunks import local_part
from ..models.families import FAMILIES
from ..models.hf_config import ladder_config_class
from ..models.loading import place_parameters, restore_buffers
from ..models.presets import ModelShape
from ..models.sharding import ROW_PARALLEL, ShardSpec, check_divides
from .layout import DP, Layout
from .loss import Loss, chunked_cross_entropy, head_of
from .parallelize import parallelize
from .recipe import Recipe


class ModelWithLoss(nn.Module):
    """A model and its loss as one module, so that FSDP sees the head where it is used."""

    def __init__(self, model: PreTrainedModel, *, z_loss: float, chunk: int, compiled: bool) -> None:
        super().__init__()
        self.model = model
        self.z_loss, self.chunk, self.compiled = z_loss, chunk, compiled

    def forward(self, batch: dict[str, Tensor], divisor: Tensor | float) -> Loss:
        """``batch``: input_ids, labels and maybe position_ids, [rows, tokens]. ``divisor`` as in ``chunked_cross_entropy``."""
        inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
        ranks = getattr(self.model, "emulated_ranks", 1)
        if ranks > 1 and "position_ids" in inputs:
            inputs["position_ids"] = inputs["position_ids"].repeat(ranks, 1)
        hidden = self.model.base_model(**inputs, use_cache=False).last_hidden_state
        return chunked_cross_entropy(
            hidden,
            head_of(self.model),
            batch["labels"],
            divisor=divisor,
            z_loss=self.z_loss,
            chunk=self.chunk,
            compiled=self.compiled,
        )


def build(recipe: Recipe, layout: Layout) -> ModelWithLoss:
    """This rank's part, float32 weights, in training mode."""
    run = recipe.run
    model = new_model(recipe, layout)
    root = ModelWithLoss(model, z_loss=run.z_loss, chunk=run.loss_chunk, compiled=run.compile).train()
    parallelize(
        model,
        root=root,
        reducer=layout.tensor.reducer(recipe.parallel.reducer),
        emulated_ranks=recipe.parallel.emulate_ranks,
        checkpoint_activations=run.checkpoint_activations,
        compile_options={"dynamic": False, "shared": True} if run.compile else None,
        data_mesh=layout.mesh[DP],
        compute_dtype=torch.bfloat16 if run.precision == "bf16" else None,
    )
    return root


def hf_config(recipe: Recipe, *, end_of_document: int | None = None) -> Any:
    """The Hugging Face config of the model a recipe trains, its wiring included."""
    shape, own = recipe.model.shape(), recipe.model
    fields = dict(
        **shape.to_hf(),
        max_position_embeddings=recipe.data.sequence,
        rms_norm_eps=own.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": own.rope_theta},
        attention_dropout=0.0,
        initializer_range=own.init_std,
        pad_token_id=None,
        bos_token_id=end_of_document,
        eos_token_id=end_of_document,
    )
    return ladder_config_class(shape.family)(**fields | dict(own.options), wiring=trained_wiring(recipe).spec)


def trained_wiring(recipe: Recipe) -> Wiring:
    """As the checkpoint will name it: a rank-dependent one with the number of ranks it is trained for."""
    wiring, ranks = recipe.wiring, max(recipe.parallel.tp, recipe.parallel.emulate_ranks)
    return replace(wiring, tp=ranks) if wiring.kind in RANK_DEPENDENT else wiring


def new_model(recipe: Recipe, layout: Layout) -> PreTrainedModel:
    """Random weights that depend on the seed and the parameter's name alone: any layout starts from the same model."""
    shape = recipe.model.shape()
    family, config = FAMILIES[shape.family], hf_config(recipe)
    check_divides(shape, family, layout.tp)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=recipe.model.attention)
    restore_buffers(model, layout.device)

    def draw(name: str, whole: tuple[int, ...], spec: ShardSpec | None) -> Tensor:
        return local_part(initial_weight(name, whole, recipe.model.init_std, shape, recipe.run.seed), spec)

    model.whole_shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    place_parameters(model, draw, ModelShape.from_hf(config.to_dict()), family, layout.tensor)
    for module in model.modules():
        own = list(module.parameters(recurse=False))
        if own and all(parameter.dim() == 1 for parameter in own):
            model._init_weights(module)  # norms begin as their family wants (at one, or at zero where one is added)
    return model


def initial_weight(name: str, whole: tuple[int, ...], std: float, shape: ModelShape, seed: int) -> Tensor:
    """Normal; projections back into the stream are scaled by depth, so that the stream's variance does not grow with it."""
    if len(whole) == 1:
        return torch.zeros(whole)
    module = name.removesuffix(".weight").rpartition(".")[2]
    if module in ROW_PARALLEL:
        std = std / math.sqrt(2 * shape.num_layers)
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    return torch.empty(whole).normal_(0.0, std, generator=generator)
