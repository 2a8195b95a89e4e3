"""Tell transformers' Auto classes about rewired checkpoints, without importing transformers before the user does.

``import ladder_residual`` followed by ``AutoModelForCausalLM.from_pretrained(...)`` must work, yet importing transformers takes
seconds, which ``ladder --help`` or ``ladder plan`` should not pay; and while transformers' own modules import each other is no
time to make classes out of theirs. So a finder waits for the two modules that hold the Auto tables and teaches each table to make
our classes at the first question about one of them.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from functools import cache
from types import ModuleType
from typing import Any

from .families import FAMILIES, PREFIX


@cache
def register_configs() -> None:
    from transformers.models.auto.configuration_auto import AutoConfig

    from .hf_config import ladder_config_class

    for family in FAMILIES.values():
        AutoConfig.register(family.ladder_type, ladder_config_class(family.model_type), exist_ok=True)


@cache
def register_models() -> None:
    from transformers.models.auto.modeling_auto import AutoModelForCausalLM

    from .model import ladder_classes

    for family in FAMILIES.values():
        config_class, model_class = ladder_classes(family.model_type)
        AutoModelForCausalLM.register(config_class, model_class, exist_ok=True)


def _teach(table: Any, is_ours: Callable[[Any], bool], register: Callable[[], None]) -> None:
    """Let ``table`` call ``register`` before it answers a question about one of our keys."""
    base = type(table)

    def __contains__(self: Any, key: Any) -> bool:
        if is_ours(key):
            register()
        return base.__contains__(self, key)

    def __getitem__(self: Any, key: Any) -> Any:
        if is_ours(key):
            register()
        return base.__getitem__(self, key)

    table.__class__ = type(base.__name__, (base,), {"__contains__": __contains__, "__getitem__": __getitem__})


def _teach_configs(module: ModuleType) -> None:
    """Keyed by model_type."""
    _teach(module.CONFIG_MAPPING, lambda key: isinstance(key, str) and key.startswith(PREFIX), register_configs)


def _teach_models(module: ModuleType) -> None:
    """Keyed by config class."""
    _teach(module.MODEL_FOR_CAUSAL_LM_MAPPING, lambda key: getattr(key, "model_type", "").startswith(PREFIX), register_models)


_AFTER_IMPORT: dict[str, Callable[[ModuleType], None]] = {
    "transformers.models.auto.configuration_auto": _teach_configs,
    "transformers.models.auto.modeling_auto": _teach_models,
}


class _AfterImport(importlib.abc.MetaPathFinder):
    """Finds the modules named above as everyone else does, and calls the function after they were executed."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in _AFTER_IMPORT:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_teach(module: ModuleType) -> None:
            execute(module)
            _AFTER_IMPORT[fullname](module)

        spec.loader.exec_module = execute_and_teach  # type: ignore[method-assign]
        return spec


def register_when_imported() -> None:
    """Idempotent; what is loaded already learns at once."""
    if any(isinstance(finder, _AfterImport) for finder in sys.meta_path):
        return
    sys.meta_path.insert(0, _AfterImport())
    for name, teach in _AFTER_IMPORT.items():
        if name in sys.modules:
            teach(sys.modules[name])
