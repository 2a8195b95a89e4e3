"""Tell transformers' Auto classes about rewired checkpoints, without importing transformers before the user does.

``import ladder_residual`` followed by ``AutoModelForCausalLM.from_pretrained(...)`` must work, yet importing transformers' Auto
classes takes seconds, which ``ladder --help`` or ``ladder plan`` should not pay. So a finder waits for the two modules that
hold the Auto tables and registers right after each is loaded.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType

from .families import FAMILIES


def register_configs(*, models_ready: bool = False) -> None:
    models = sys.modules.get("transformers.models.auto.modeling_auto")
    if not models_ready and models is not None and getattr(models.__spec__, "_initializing", False):
        return  # it is what imports the configs; they cannot be used before it is complete, and then it registers them itself

    from transformers.models.auto.configuration_auto import AutoConfig

    from .hf_config import ladder_config_class

    for family in FAMILIES.values():
        AutoConfig.register(family.ladder_type, ladder_config_class(family.model_type), exist_ok=True)


def register_models() -> None:
    from transformers.models.auto.modeling_auto import AutoModelForCausalLM

    from .model import ladder_classes

    register_configs(models_ready=True)
    for family in FAMILIES.values():
        config_class, model_class = ladder_classes(family.model_type)
        AutoModelForCausalLM.register(config_class, model_class, exist_ok=True)


_AFTER_IMPORT: dict[str, Callable[[], None]] = {
    "transformers.models.auto.configuration_auto": register_configs,
    "transformers.models.auto.modeling_auto": register_models,
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

        def execute_and_register(module: ModuleType) -> None:
            execute(module)
            _AFTER_IMPORT[fullname]()

        spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec


def register_when_imported() -> None:
    """Idempotent; registers at once what is loaded already."""
    if any(isinstance(finder, _AfterImport) for finder in sys.meta_path):
        return
    sys.meta_path.insert(0, _AfterImport())
    for name, register in _AFTER_IMPORT.items():
        if name in sys.modules:
            register()
