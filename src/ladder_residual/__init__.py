"""Ladder Residual: tensor parallelism that does not wait for the network.

Importing this package lets transformers' Auto classes load converted checkpoints. It imports neither torch nor transformers: the
first use of a function does (``plan`` needs neither).

Examples:
    >>> import ladder_residual as ladder
    >>> conversion = ladder.convert("stories", "stories-last-2", "ladder:last-2")
    >>> ladder.generate("stories-last-2", "Once upon a time", max_new_tokens=5, temperature=0)[0].text
    ', there was a little'
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from .common.version import __version__
from .core.config import Wiring
from .models.register import register_when_imported

if TYPE_CHECKING:
    from .adapt.api import adapt, select_layers
    from .adapt.refit_checkpoint import refit
    from .bench.demo import export_demo
    from .evaluate.api import evaluate
    from .generation.api import generate, load
    from .models.convert import convert
    from .models.hf import rewire
    from .plan.api import plan

__all__ = [
    "Wiring",
    "__version__",
    "adapt",
    "convert",
    "evaluate",
    "export_demo",
    "generate",
    "load",
    "plan",
    "refit",
    "rewire",
    "select_layers",
]

_MODULES = {  # where a function is, below this package
    "adapt": "adapt.api",
    "convert": "models.convert",
    "evaluate": "evaluate.api",
    "export_demo": "bench.demo",
    "generate": "generation.api",
    "load": "generation.api",
    "plan": "plan.api",
    "refit": "adapt.refit_checkpoint",
    "rewire": "models.hf",
    "select_layers": "adapt.api",
}


class _Package(ModuleType):
    """``plan``, ``adapt`` and ``evaluate`` are functions here and packages below: importing such a package sets its name, and
    must not replace the function."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _MODULES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
register_when_imported()


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    if name == "model":  # the stub in checkpoints of earlier versions imports it
        return import_module(f"{__name__}.models.hf")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
