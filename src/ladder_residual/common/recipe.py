"""A recipe: a TOML file read into a dataclass, every key and value checked. No torch.

    base = "train-1b-standard.toml"    # everything of that recipe, except what stands here
    [model]
    wiring = "ladder"

The annotations of the dataclass are the rules: ``int``, ``float``, ``bool``, ``str``, ``| None``, ``Literal["a", "b"]``, tuples,
mappings, other dataclasses (tables), and ``Annotated[int, Range(1)]``. ``__post_init__`` calls ``check(self)``, so a dataclass made in
Python is held to them too.
"""

from __future__ import annotations

import math
import re
import tomllib
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

from .suggest import did_you_mean
from .terminal import printable

MAX_BASES = 8
_WORDS = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
_NO_MATCH = object()
T = typing.TypeVar("T")


@dataclass(frozen=True)
class Range:
    """``low`` to ``high``, both included; ``above`` and ``below`` exclude their ends."""

    low: float = -math.inf
    high: float = math.inf
    above: float = -math.inf
    below: float = math.inf

    def check(self, value: float, name: str) -> None:
        if self.low <= value <= self.high and self.above < value < self.below:
            return
        ends = {"at least": self.low, "above": self.above, "at most": self.high, "below": self.below}
        limits = " and ".join(f"{words} {end:g}" for words, end in ends.items() if math.isfinite(end))
        raise ValueError(f"{name} must be {limits}, got {value}")


def read(path: str | Path, relative: Iterable[str] = ()) -> dict[str, Any]:
    """The document of a recipe and its bases. Paths under ``relative`` (``table.key``) are relative to the file that names them."""
    return _read(Path(path), tuple(relative), 0)


def _read(path: Path, relative: tuple[str, ...], depth: int) -> dict[str, Any]:
    if depth > MAX_BASES:
        raise ValueError(f"{path}: recipes name each other as base in a circle, or more than {MAX_BASES} deep")
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"there is no recipe {path}") from None
    except (OSError, ValueError, RecursionError) as error:  # no UTF-8, no TOML, a number of 5,000 digits, ...
        raise ValueError(f"cannot read the recipe {path}: {error}") from error
    for name in relative:
        table, _, key = name.partition(".")
        values = document.get(table)
        if isinstance(values, dict) and isinstance(values.get(key), str) and values[key]:
            values[key] = str(path.parent / values[key])  # an absolute one stays as it is
    base = document.pop("base", None)
    if base is None:
        return document
    if not isinstance(base, str):
        raise ValueError(f"{path}: base must be the path of another recipe, got {base!r:.60}")
    below = _read(path.parent / base, relative, depth + 1)
    below.pop("name", None)  # a recipe built on another is called as its own file is
    return _merged(below, document)


def _merged(below: dict[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(below)
    for key, value in above.items():
        mine = result.get(key)
        result[key] = _merged(mine, value) if isinstance(mine, dict) and isinstance(value, dict) else value
    return result


def override(document: dict[str, Any], text: str) -> None:
    """Apply ``a.b=value`` to ``document``; the value is as in TOML, and a bare word is a string."""
    name, equals, value = text.partition("=")
    keys = [key.strip() for key in name.split(".")]
    if not equals or not all(keys):
        raise ValueError(f"--set takes a.b=value, such as run.steps=20; got {text!r:.80}")
    try:
        parsed = tomllib.loads(f"value = {value}")["value"]
    except (ValueError, RecursionError):
        parsed = value.strip()
    for key in keys[:-1]:
        document = document.setdefault(key, {})
        if not isinstance(document, dict):
            raise ValueError(f"--set {text!r:.80}: {key} is no table")
    document[keys[-1]] = parsed


def build(kind: type[T], document: Mapping[str, Any], where: str) -> T:
    """A ``kind`` from ``document``, checked; errors begin with ``where``."""
    try:
        made = _built(kind, document, "")
        check(made)
    except ValueError as error:
        raise ValueError(f"{where}: {error}".replace("\n", "\\n")) from error  # a key may hold a line end
    return made


def build_named(kind: type[T], tables: Any, heading: str, where: str) -> dict[str, T]:
    """A ``kind`` for each table ``[HEADING.NAME]``, with NAME as its field ``name``."""
    if not isinstance(tables, Mapping):
        raise ValueError(f"{where}: {heading} must be tables such as [{heading}.NAME], got {tables!r:.60}")
    made = {}
    for name, table in tables.items():
        if not re.fullmatch(r"[\w.-]{1,60}", name):
            raise ValueError(f"{where}: {name!r:.60} is no name for [{heading}.NAME]: use letters, digits, dots and dashes")
        if not isinstance(table, Mapping) or "name" in table:
            raise ValueError(f"{where}: [{heading}.{name}] must be a table without a name of its own, got {table!r:.60}")
        made[name] = build(kind, {**table, "name": name}, f"{where}: {heading}.{name}")
    return made


def _built(kind: Any, document: Mapping[str, Any], prefix: str) -> Any:
    known = {field.name: field for field in fields(kind)}
    for key in document:
        if key not in known:
            raise ValueError(f"unknown key {prefix}{key}{did_you_mean(key, known)}; known here: {', '.join(known)}")
    for key, field in known.items():
        if key not in document and field.default is MISSING and field.default_factory is MISSING:
            raise ValueError(f"{prefix}{key} is missing")
    return kind(**document)


def check(config: Any, prefix: str = "") -> None:
    """Hold every field to its annotation; lists become tuples, tables dataclasses and whole numbers floats where those are wanted."""
    for name, hint in typing.get_type_hints(type(config), include_extras=True).items():
        object.__setattr__(config, name, _checked(getattr(config, name), hint, prefix + name))


def one_of(name: str, value: Any, choices: Iterable[Any]) -> None:
    known = [str(choice) for choice in choices]
    if value not in known:
        raise ValueError(f"{name} is {value!r:.60}{did_you_mean(value, known)}; choose from {', '.join(known)}")


def _checked(value: Any, hint: Any, name: str) -> Any:
    hint, *limits = typing.get_args(hint) if typing.get_origin(hint) is typing.Annotated else (hint,)
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    for option in options:
        found = _matched(value, option, name)
        if found is not _NO_MATCH:
            for limit in limits if found is not None else ():
                limit.check(found, name)
            return found
    raise ValueError(
        f"{name} must be {' or '.join(_words(option) for option in options if option is not types.NoneType)}, got {value!r:.60}"
    )


def _matched(value: Any, option: Any, name: str) -> Any:
    """``value`` as ``option`` wants it, or ``_NO_MATCH``."""
    origin, arguments = typing.get_origin(option), typing.get_args(option)
    if option is types.NoneType:
        return None if value is None else _NO_MATCH
    if origin is typing.Literal:
        one_of(name, value, arguments)
        return value
    if isinstance(option, type) and is_dataclass(option):
        if isinstance(value, Mapping):
            value = _built(option, value, f"{name}.")
        if not isinstance(value, option):
            return _NO_MATCH
        check(value, f"{name}.")
        return value
    if origin is tuple and isinstance(value, list | tuple):
        if arguments[-1] is Ellipsis:
            arguments = (arguments[0],) * len(value)
        if len(arguments) != len(value):
            return _NO_MATCH
        return tuple(_checked(item, part, f"{name}[{i}]") for i, (item, part) in enumerate(zip(value, arguments, strict=True)))
    if option is float and isinstance(value, int | float) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:  # a whole number of more than 308 digits
            return math.inf if value > 0 else -math.inf
    if origin is Mapping and isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, str) and printable(value) != value:
        raise ValueError(f"{name} holds control characters: {value!r:.60}")
    return value if option in _WORDS and type(value) is option else _NO_MATCH


def _words(option: Any) -> str:
    if typing.get_origin(option) is not tuple:
        return _WORDS.get(option, "a table")
    arguments = typing.get_args(option)
    return "a list" if arguments[-1] is Ellipsis else f"a list of {len(arguments)} values"
