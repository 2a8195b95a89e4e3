"""Hugging Face's own models with another wiring: their decoder layers get our ``forward``, nothing else changes.

A layer returns a ``State`` instead of a tensor and the next one takes it, so the family's model class, its masks, caches,
``generate``, ``save_pretrained`` and gradient checkpointing are used as they are. Importing ``ladder_residual`` registers the
classes made here with transformers' Auto classes; by hand:

    model = rewire(AutoModelForCausalLM.from_pretrained("..."), "ladder:last-half")
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping

from ..common.files import replace_text
from ..core.config import ADDS_PARTIALS, Wiring
from ..core.reduce import Reducer
from ..core.wiring import Branch, State, finalize, step
from .candidates import Candidates, ChoosesFromCandidates
from .families import FAMILIES, Family, check_wiring, family_of
from .hf_config import STUB, auto_map, class_name, ladder_config_class, stub_text, wiring_of


class Placement(NamedTuple):
    """Where a decoder layer stands."""

    family: Family
    wiring: Wiring
    layer: int


def module_partial(
    norm: nn.Module | None, module: nn.Module, kwargs: dict[str, Any], scale: float | None, after: nn.Module | None, x: Tensor
) -> Tensor:
    """What a module adds to the stream ``x`` on this rank."""
    out = module(x if norm is None else norm(x), **kwargs)
    out = out[0] if isinstance(out, tuple) else out
    out = out if scale is None else out * scale
    return out if after is None else after(out)


def both_partials(norm: nn.Module | None, modules: Any, scale: float | None, x: Tensor) -> Tensor:
    """The two modules of a parallel layer, which read one norm."""
    normed = x if norm is None else norm(x)
    attention, mlp = (module_partial(None, module, kwargs, scale, after, normed) for module, kwargs, after in modules)
    return attention + mlp


class Compute(NamedTuple):
    """How a layer's modules are computed: as written, or compiled (``train/compile.py``). All-reduces are never inside."""

    attention: Callable[..., Tensor] = module_partial
    mlp: Callable[..., Tensor] = module_partial
    both: Callable[..., Tensor] = both_partials


EAGER = Compute()


class RewiredLayer(nn.Module):
    """Mixed in before the family's decoder layer class; only ``forward`` differs."""

    compute: Compute = EAGER  # not used with a cache: a layer's place in it would be compiled in
    placement: Placement
    reducer: Reducer
    gradient_checkpointing: bool
    switched: Tensor | None = None  # ``annealed`` in core/wiring.py

    def forward(self, hidden_states: Tensor | State, **kwargs: Any) -> Tensor | State:
        wiring, layer = self.placement.wiring, self.placement.layer
        state = hidden_states if isinstance(hidden_states, State) else State(hidden_states)
        if self.gradient_checkpointing and self.training:
            for pending in state.pending:
                pending.reduction.waited_again = True  # a recomputed layer waits once more for what came in
        state = step(wiring, layer, state, self.branches(kwargs), self.reducer, self.switched)
        return finalize(state, self.reducer) if layer == wiring.num_layers - 1 else state

    def branches(self, attention_kwargs: dict[str, Any]) -> tuple[Branch, ...]:
        family, wiring, layer = self.placement
        kind = wiring.kind_of(layer)
        attention, mlp = getattr(self, family.attention), getattr(self, family.mlp)
        attention_norm = getattr(self, family.attention_norm) if family.attention_norm else None
        mlp_norm = getattr(self, family.mlp_norm, None) if family.mlp_norm else None
        scale = getattr(self, family.multiplier) if family.multiplier else None
        attention_after = getattr(self, family.attention_after) if family.attention_after else None
        mlp_after = getattr(self, family.mlp_after) if family.mlp_after else None
        compute = EAGER if attention_kwargs.get("past_key_values") is not None else self.compute

        if kind == "parallel":
            modules: Any = ((attention, attention_kwargs, attention_after), (mlp, {}, mlp_after))
            return (Branch(partial(compute.both, attention_norm, modules, scale)),)
        if kind not in ADDS_PARTIALS:
            return (
                Branch(partial(compute.attention, attention_norm, attention, attention_kwargs, scale, None), attention_after),
                Branch(partial(compute.mlp, mlp_norm, mlp, {}, scale, None), mlp_after),
            )
        # What comes after a module (a dropout) is applied to the partial that joins the stream.
        return (
            Branch(partial(compute.attention, attention_norm, attention, attention_kwargs, scale, attention_after)),
            Branch(partial(compute.mlp, mlp_norm, mlp, {}, scale, mlp_after)),
        )


@cache
def _rewired_layer_class(base: type[nn.Module]) -> type[nn.Module]:
    return type(f"Rewired{base.__name__}", (RewiredLayer, base), {"__module__": __name__})


class RewiredModel(ChoosesFromCandidates, PreTrainedModel):
    """Mixed in before the family's ``...ForCausalLM``."""

    auto_map: ClassVar[dict[str, str]] = {}  # trl looks for it on the class

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        place_layers(self)

    @property
    def wiring(self) -> Wiring:
        return wiring_of(self.config)

    def needs(self, candidates: Candidates | None) -> None:
        head: Any = self.get_output_embeddings()
        if hasattr(head, "candidates"):
            head.candidates = candidates if _logits_stay_in_order(self.config, head.weight.dtype) else None

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: Any = None, **kwargs: Any) -> None:  # type: ignore[override]
        options = {"use_reentrant": False} | (gradient_checkpointing_kwargs or {})
        if options["use_reentrant"]:
            raise ValueError(
                "reentrant gradient checkpointing takes and returns plain tensors, but a rewired layer also hands on the "
                "all-reduces in flight: pass gradient_checkpointing_kwargs={'use_reentrant': False}"
            )
        super().gradient_checkpointing_enable(gradient_checkpointing_kwargs=options, **kwargs)

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
        if any(spec is not None for spec in getattr(self, "shard_specs", {}).values()):
            raise ValueError("this model holds one rank's shards; saving them would write a checkpoint that no one can load")
        result = super().save_pretrained(save_directory, *args, **kwargs)
        replace_text(Path(save_directory, STUB), stub_text())
        return result


def _logits_stay_in_order(config: Any, dtype: torch.dtype) -> bool:
    """Whether what a family does to its logits keeps minus infinity, and makes no equals of what differs."""
    capped = getattr(config, "final_logit_softcapping", None) is not None
    rounded = dtype.itemsize < 4 and math.frexp(getattr(config, "logits_scaling", 1.0))[0] != 0.5  # no power of two
    return not capped and not rounded


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    base: Any = model.base_model
    return base.layers  # every family here calls them so


def place_layers(model: PreTrainedModel) -> None:
    wiring = wiring_of(model.config)
    family = family_of(model.config.to_dict())
    check_wiring(family, wiring)
    layer: Any
    for index, layer in enumerate(decoder_layers(model)):
        if not isinstance(layer, RewiredLayer):
            layer.__class__ = _rewired_layer_class(layer.__class__)
            layer.reducer = Reducer()
        layer.placement = Placement(family, wiring, index)
        if wiring.kind_of(index) == "parallel" and family.mlp_norm and hasattr(layer, family.mlp_norm):
            delattr(layer, family.mlp_norm)  # one norm per layer


def set_reducer(model: PreTrainedModel, reducer: Reducer) -> None:
    """Let every layer all-reduce through ``reducer``."""
    layer: Any
    for layer in decoder_layers(model):
        layer.reducer = reducer


def set_switched(model: PreTrainedModel, switched: Tensor | None) -> None:
    """How far the ladder layers are on the way from standard (0) to ladder (1); None: they are ladder layers."""
    layer: Any
    for layer in decoder_layers(model):
        layer.switched = switched


def rewire(model: PreTrainedModel, wiring: str | Wiring) -> PreTrainedModel:
    """Give a loaded Hugging Face model another wiring, in place; weights stay as they are.

    Args:
        model: A causal language model of one of the supported families, whole or one rank's shards.
        wiring: A spec string such as ``"ladder"``, ``"ladder:last-half"`` or ``"ladder:4,5,9"``, or a ``Wiring``.

    Returns:
        The same model. ``save_pretrained`` writes a checkpoint that loads with this wiring.

    Raises:
        ValueError: If the family is not supported, the wiring names layers the model does not have, or its weights do not carry over.

    Examples:
        >>> from transformers import AutoModelForCausalLM
        >>> model = rewire(AutoModelForCausalLM.from_pretrained("stories"), "ladder:last-half")
        >>> model.wiring.spec
        'ladder:3-4'
    """
    if not isinstance(model, PreTrainedModel):
        raise ValueError(
            f"rewire takes a transformers model, got {model!r:.60}: convert rewires a checkpoint, load has a wiring="
        )
    family = family_of(model.config.to_dict())
    chosen = Wiring.parse(wiring.spec if isinstance(wiring, Wiring) else wiring, model.config.num_hidden_layers)
    check_wiring(family, chosen)
    wiring_of(model.config).check_same_weights(chosen)
    config_class, model_class = ladder_classes(family.model_type)
    if not isinstance(model, RewiredModel):
        expected = model_class.__bases__[1]
        if type(model) is not expected:
            raise ValueError(f"can rewire a {expected.__name__}, got {type(model).__name__}")
        model.__class__ = model_class
        model.config.__class__ = config_class
        model.config.auto_map = auto_map(family.model_type)
    model.config.wiring = chosen.spec
    place_layers(model)
    return model


@cache
def ladder_classes(model_type: str) -> tuple[type[Any], type[PreTrainedModel]]:
    """The config class and the model class of a rewired family."""
    # Not at the top: importing the Auto tables is what calls us (register.py).
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    config_class = ladder_config_class(model_type)
    base = getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type])
    name = class_name(model_type, "ForCausalLM")
    model_class = type(name, (RewiredModel, base), {"__module__": __name__, "config_class": config_class})
    # Some checkpoints store weights under other names than the modules (experts one by one, gpt_neox): the family's own rules hold.
    conversions = get_checkpoint_conversion_mapping(model_type) or get_checkpoint_conversion_mapping(base.__name__)
    if conversions:
        register_checkpoint_conversion_mapping(FAMILIES[model_type].ladder_type, conversions, overwrite=True)
    return config_class, model_class


def __getattr__(name: str) -> Any:
    """``LadderLlamaConfig``, ``LadderQwen3ForCausalLM``, ...: made on first use."""
    for model_type in FAMILIES:
        if name == class_name(model_type, "Config"):
            return ladder_config_class(model_type)
        if name == class_name(model_type, "ForCausalLM"):
            return ladder_classes(model_type)[1]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
