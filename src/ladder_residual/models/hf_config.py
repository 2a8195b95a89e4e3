"""Config classes of rewired checkpoints: the family's own config, another ``model_type``, and the field ``wiring``."""

from __future__ import annotations

from functools import cache
from importlib import resources
from typing import Any

from ..core.config import AUTHORS_KEY, CONFIG_KEY, Wiring
from .families import FAMILIES, check_wiring

STUB = "ladder_stub.py"  # travels with a checkpoint: loads it for people who have not imported us, or says what to install


def stub_text() -> str:
    return resources.files("ladder_residual").joinpath("assets", STUB).read_text(encoding="utf-8")


def wiring_of(config: Any) -> Wiring:
    """The wiring of a config object, rewired or plain."""
    fields = {key: getattr(config, key, None) for key in (CONFIG_KEY, AUTHORS_KEY)}
    return Wiring.from_config(fields, config.num_hidden_layers)


def class_name(model_type: str, suffix: str) -> str:
    """``("qwen3_moe", "Config") -> "LadderQwen3MoeConfig"``"""
    return "Ladder" + "".join(part.capitalize() for part in model_type.split("_")) + suffix


def auto_map(model_type: str) -> dict[str, str]:
    module = STUB.removesuffix(".py")
    return {
        "AutoConfig": f"{module}.{class_name(model_type, 'Config')}",
        "AutoModelForCausalLM": f"{module}.{class_name(model_type, 'ForCausalLM')}",
    }


@cache
def ladder_config_class(model_type: str) -> type[Any]:
    # Not at the top: importing the Auto tables is what calls us (register.py).
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    base: Any = CONFIG_MAPPING[model_type]

    def __post_init__(self: Any, **kwargs: Any) -> None:
        base.__post_init__(self, **kwargs)
        wiring = wiring_of(self)
        check_wiring(FAMILIES[model_type], wiring)
        self.wiring = wiring.spec
        self.auto_map = auto_map(model_type)

    config_class = type(
        class_name(model_type, "Config"),
        (base,),
        {
            "__module__": "ladder_residual.models.hf",  # where pickle and the stub find it by name
            "__annotations__": {CONFIG_KEY: str | None},
            "model_type": FAMILIES[model_type].ladder_type,
            CONFIG_KEY: None,
            "__post_init__": __post_init__,
        },
    )
    return config_class
