"""A config that names a wiring gets the architecture that computes it, or is refused.

vLLM chooses a model by ``architectures`` alone. A plain checkpoint with ``wiring`` added (``--hf-overrides '{"wiring": "ladder"}'``,
or by hand in ``config.json``) would load vLLM's own model, which does not know the field, and serve the unrewired text without a
word. So every config vLLM reads passes here first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from vllm.logger import init_logger

from ..core.config import AUTHORS_KEY, CONFIG_KEY, Wiring
from ..models.families import FAMILIES, PREFIX, family_of
from ..models.hf_config import class_name
from .versions import check_version, wrap

logger = init_logger("vllm.ladder_residual")


def route(config: Any) -> None:
    """Set ``config.architectures`` to ours if the config asks for another wiring than standard."""
    fields = config.to_dict()
    asked = list(config.architectures or [])
    for part, ignored in _wirings_of_parts(fields):
        raise ValueError(
            f"{part} asks for wiring {ignored.spec}, which {asked[0] if asked else 'the model'} would ignore: drop it, or serve the "
            f"language model as a checkpoint of its own"
        )
    wiring = named_wiring(fields)
    if wiring is None:
        return
    check_version()
    family = family_of(fields)
    ours, plain = class_name(family.model_type, "ForCausalLM"), MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family.model_type]
    # An architecture of ours for another family is refused as the model is built, which knows what each of them serves.
    if any(name.startswith("Ladder") for name in asked) or wiring.kind == "standard":
        return
    other = [name for name in asked if name.lower() != plain.lower()]
    if other:
        raise ValueError(
            f"wiring {wiring.spec} is computed by {ours}, but the architecture asked for is {other[0]}, which would ignore "
            f"it: drop the wiring, or name {ours}"
        )
    logger.info("The config names a wiring: %s instead of %s", ours, plain)
    config.architectures = [ours]


def named_wiring(fields: Mapping[str, Any]) -> Wiring | None:
    """The wiring a config (or a part of one) names; ValueError if one of our families names something else."""
    layers = fields.get("num_hidden_layers", 0)
    if str(fields.get("model_type", "")).removeprefix(PREFIX) in FAMILIES:
        named = any(fields.get(key) is not None for key in (CONFIG_KEY, AUTHORS_KEY))
        return Wiring.from_config(fields, layers) if named else None
    # Some other model may have a field of this name for itself; ours says something that parses.
    try:
        wiring = Wiring.from_config(fields, layers)
    except ValueError:
        return None
    return None if wiring.kind == "standard" else wiring


def _wirings_of_parts(fields: Mapping[str, Any]) -> Iterator[tuple[str, Wiring]]:
    """Wirings other than standard inside ``text_config`` and the like, where only models of several parts look."""
    listed = [(name, part) for name, parts in fields.items() if isinstance(parts, list | tuple) for part in parts]
    for name, part in [*fields.items(), *listed]:
        if isinstance(part, Mapping):
            wiring = named_wiring(part)
            if wiring is not None and wiring.kind != "standard":
                yield name, wiring
            yield from _wirings_of_parts(part)


def route_configs() -> None:
    """Let vLLM's own reader of configs begin with ``route``, after all overrides. Idempotent."""
    from vllm.config import model as reader

    def route_first(read: Any) -> Any:
        def route_and_read(config: Any) -> Any:
            route(config)
            return read(config)

        return route_and_read

    wrap(reader, "get_hf_text_config", route_first)
