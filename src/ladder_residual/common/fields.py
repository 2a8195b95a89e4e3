"""Options of a command or a call as the dataclass that holds them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeVar

T = TypeVar("T")


def fields_from(kind: type[T], values: Mapping[str, Any]) -> T:
    """A dataclass from those of ``values`` that are named like its fields: ``fields_from(Sampling, locals())``."""
    names = {field.name for field in fields(kind)}  # type: ignore[arg-type]
    return kind(**{name: value for name, value in values.items() if name in names})
