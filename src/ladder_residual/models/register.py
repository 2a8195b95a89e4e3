"""Register rewired checkpoints with transformers' Auto classes, without importing transformers before the user does.

``import ladder_residual`` followed by ``AutoModelForCausalLM.from_pretrained(...)`` must work, in either order of the imports. But
importing transformers takes seconds, which ``ladder --help`` or ``ladder plan`` should not pay, and while its modules import each
other no class can be derived from theirs. So an import hook waits for the two modules that hold the Auto tables, and each table
registers our classes when it is first asked for one of them.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from functools import cache
from types import ModuleType
from typing import Any, NamedTuple

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

    from .hf import ladder_classes

    for family in FAMILIES.values():
        config_class, model_class = ladder_classes(family.model_type)
        AutoModelForCausalLM.register(config_class, model_class, exist_ok=True)


class _AutoTable(NamedTuple):
    name: str
    is_ours: Callable[[Any], bool]  # of a key
    register: Callable[[], None]


_TABLES = {
    "transformers.models.auto.configuration_auto": _AutoTable(
        "CONFIG_MAPPING", lambda key: isinstance(key, str) and key.startswith(PREFIX), register_configs
    ),
    "transformers.models.auto.modeling_auto": _AutoTable(
        "MODEL_FOR_CAUSAL_LM_MAPPING", lambda key: getattr(key, "model_type", "").startswith(PREFIX), register_models
    ),
}


def _register_on_lookup(module: ModuleType) -> None:
    name, is_ours, register = _TABLES[module.__name__]
    table = getattr(module, name)
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


class _ImportHook(importlib.abc.MetaPathFinder):
    """Finds the two modules as the default finder does, and calls ``_register_on_lookup`` after they were executed."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in _TABLES:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_hook(module: ModuleType) -> None:
            execute(module)
            _register_on_lookup(module)

        spec.loader.exec_module = execute_and_hook  # type: ignore[method-assign]
        return spec


def register_when_imported() -> None:
    """Idempotent. Modules that are loaded already are hooked at once."""
    if any(isinstance(finder, _ImportHook) for finder in sys.meta_path):
        return
    sys.meta_path.insert(0, _ImportHook())
    for name in _TABLES.keys() & sys.modules.keys():
        _register_on_lookup(sys.modules[name])
