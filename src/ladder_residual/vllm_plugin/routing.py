"""A config that names a wiring gets the architecture that computes it, or is refused.

vLLM chooses a model by ``architectures`` alone. A plain checkpoint with ``wiring`` added (``--hf-overrides '{"wiring": "ladder"}'``,
or by hand in ``config.json``) would load vLLM's own model, which does not know the field, and serve the unrewired text without a
word. So every config vLLM reads passes here first.
"""

from __future__ import annotations

import functools
from typing import Any

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from vllm.logger import init_logger

from ..config import AUTHORS_KEY, CONFIG_KEY, Wiring
from ..families import FAMILIES, PREFIX, family_of
from ..hf_config import class_name, wiring_of

logger = init_logger("vllm.ladder_residual")


def route(config: Any) -> None:
    """Set ``config.architectures`` to ours if the config asks for another wiring than standard."""
    if not _names_a_wiring(config):
        return
    family = family_of(config.to_dict())
    ours, plain = class_name(family.model_type, "ForCausalLM"), MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family.model_type]
    asked = list(config.architectures or [])
    # An architecture of ours for another family is refused as the model is built, which knows what each of them serves.
    if any(name.startswith("Ladder") for name in asked) or wiring_of(config).kind == "standard":
        return
    other = [name for name in asked if name.lower() != plain.lower()]
    if other:
        raise ValueError(
            f"wiring {wiring_of(config).spec} is computed by {ours}, but the architecture asked for is {other[0]}, which would ignore "
            f"it: drop the wiring, or name {ours}"
        )
    logger.info("The config names a wiring: %s instead of %s", ours, plain)
    config.architectures = [ours]


def _names_a_wiring(config: Any) -> bool:
    if str(getattr(config, "model_type", "")).removeprefix(PREFIX) in FAMILIES:
        return any(getattr(config, key, None) is not None for key in (CONFIG_KEY, AUTHORS_KEY))
    # Some other model may have a field of this name for itself; ours is a spec string that parses.
    spec = getattr(config, CONFIG_KEY, None)
    try:
        return isinstance(spec, str) and Wiring.parse(spec, getattr(config, "num_hidden_layers", 0)).kind != "standard"
    except ValueError:
        return False


def route_configs() -> None:
    """Let vLLM's own reader of configs end with ``route``. Idempotent."""
    from vllm.config import model as reader

    read = getattr(reader, "get_config", None)
    if read is None:
        logger.warning(
            "this vLLM reads configs in another way than the plugin knows: name the architecture as well as the wiring in "
            "--hf-overrides, or a plain checkpoint is served as it is"
        )
        return
    if getattr(read, "routes_wirings", False):
        return

    @functools.wraps(read)
    def read_and_route(*args: Any, **kwargs: Any) -> Any:
        config = read(*args, **kwargs)
        route(config)
        return config

    read_and_route.routes_wirings = True  # type: ignore[attr-defined]
    reader.get_config = read_and_route
