"""Which layer is wired how: the spec strings, and their place in a checkpoint's ``config.json``.

    >>> Wiring.parse("ladder:last-half", num_layers=32).spec
    'ladder:16-31'

A wiring is one *kind* applied to a set of layers; every other layer is ``standard``. The rules themselves (who reads what,
when an all-reduce starts and when it is waited for) are in ``wiring.py``. Nothing here imports torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from ..common.suggest import did_you_mean

KINDS = ("standard", "ladder", "parallel", "desync", "delayed", "no-comm")
LEAST_STEP = {"desync": 2, "delayed": 1}  # kinds that are written with a number (desync-2x, delayed-1), and the least it may be
EXAMPLES = "standard, ladder, ladder:16-31, ladder:last-half, parallel, desync-2x, delayed-1, no-comm"
# On these wirings ranks hold different streams, so the function a checkpoint computes depends on the number of ranks.
RANK_DEPENDENT = ("desync", "delayed", "no-comm")
# On these a module's partial joins the stream before it is reduced; on all others the stream takes the reduced output.
ADDS_PARTIALS = ("parallel", "desync", "delayed", "no-comm")
MAX_LAYERS = 100_000  # far above any model; keeps a malformed config from allocating the layer list of "10**12 layers"
CONFIG_KEY = "wiring"
AUTHORS_KEY = "ladder_layers"  # the field of the paper's own checkpoints: an int (the last k layers) or a list of layers


@dataclass(frozen=True)
class Wiring:
    """Which layers of a model read what: ``kind`` on ``layers``, ``standard`` elsewhere.

    Attributes:
        kind: ``"standard"``, ``"ladder"``, ``"parallel"``, ``"desync"``, ``"delayed"`` or ``"no-comm"``.
        layers: The layers of that kind, sorted, without duplicates.
        num_layers: Layers of the model.
        step: The N of desync-Nx (one all-reduce every N modules) or the delta of delayed-delta.
        tp: If set, the only number of ranks on which a rank-dependent wiring computes what it was trained for.

    Examples:
        >>> wiring = Wiring.parse("ladder:last-half", num_layers=8)
        >>> wiring.spec, wiring.layers, wiring.picture()
        ('ladder:4-7', (4, 5, 6, 7), '||||####')
    """

    kind: str
    layers: tuple[int, ...]
    num_layers: int
    step: int = 0
    tp: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(
                f"unknown wiring kind {self.kind!r}{did_you_mean(self.kind, KINDS)}; choose from {', '.join(KINDS)}"
            )
        if not _is_int(self.num_layers) or not 1 <= self.num_layers <= MAX_LAYERS:
            raise ValueError(f"num_layers must be a whole number from 1 to {MAX_LAYERS}, got {self.num_layers!r}")
        if not all(map(_is_int, self.layers)):
            raise ValueError(f"layers of a wiring must be whole numbers, got {list(self.layers)!r:.80}")
        if wrong := [layer for layer in self.layers if not 0 <= layer < self.num_layers]:
            raise ValueError(_no_such_layer("wiring", wrong[0], self.num_layers))
        if self.tp is not None:
            if self.kind not in RANK_DEPENDENT:
                raise ValueError(
                    f"'@{self.tp}' ties a wiring to {self.tp} ranks, but {self.kind} does not depend on them: drop it"
                )
            if not _is_int(self.tp) or self.tp < 1:
                raise ValueError(f"the number of ranks of a wiring must be a positive whole number, got {self.tp!r}")
        if self.kind == "standard" or not self.layers:
            # One spelling for "nothing is rewired", so that equal wirings compare equal.
            self._set(kind="standard", layers=(), step=0, tp=None)
            return
        self._set(layers=tuple(sorted(set(self.layers))))
        least = LEAST_STEP.get(self.kind)
        if least is not None and not (_is_int(self.step) and least <= self.step <= 2 * MAX_LAYERS):
            raise ValueError(f"{self.kind} needs a number of modules, at least {least}, got {self.step!r}")

    def _set(self, **fields: Any) -> None:
        for name, value in fields.items():
            object.__setattr__(self, name, value)

    @classmethod
    def parse(cls, spec: str, num_layers: int) -> Wiring:
        """Read ``KIND[:LAYERS][@RANKS]``; raises ValueError naming the part that is wrong."""
        if not isinstance(spec, str):
            raise ValueError(f"a wiring is a string such as {EXAMPLES}; got {type(spec).__name__} {spec!r:.80}")
        text, at, ranks = spec.strip().lower().partition("@")
        name, colon, layers = text.partition(":")
        kind, step = _parse_name(name.strip(), spec)
        tp = _whole(ranks.strip(), f"the number of ranks after '@' in wiring {spec!r:.80}") if at else None
        one = cls(kind, (0,), num_layers, step, tp)  # checks num_layers before the layer list is built from it
        if colon and kind == "standard":
            raise ValueError(f"wiring {spec!r:.80}: standard takes no layers; name the layers of the other kind instead")
        chosen = tuple(_parse_layers(layers, num_layers, spec)) if colon else tuple(range(num_layers))
        if not chosen:
            raise ValueError(
                f"wiring {spec!r:.80} names no layer of a model that has {num_layers}; write standard if that is meant"
            )
        return replace(one, layers=chosen)

    @classmethod
    def from_config(cls, config: Mapping[str, Any], num_layers: int) -> Wiring:
        """The wiring a ``config.json`` asks for: our ``wiring`` field, or the authors' ``ladder_layers``."""
        if config.get(CONFIG_KEY) is not None:
            return cls.parse(config[CONFIG_KEY], num_layers)
        plain = cls("standard", (), num_layers)  # checks num_layers before anything is compared with it
        layers = config.get(AUTHORS_KEY)
        if layers is None:
            return plain
        if _is_int(layers):
            if not 0 <= layers <= num_layers:
                raise ValueError(f"{AUTHORS_KEY}={layers} asks for the last {layers} layers of a model that has {num_layers}")
            return cls("ladder", tuple(range(num_layers - layers, num_layers)), num_layers)
        if isinstance(layers, list | tuple):
            return cls("ladder", tuple(layers), num_layers)
        raise ValueError(f"{AUTHORS_KEY} must be a number (the last k layers) or a list of layers, got {layers!r:.80}")

    @property
    def name(self) -> str:
        """The kind with its number, without layers: ``ladder``, ``desync-2x``, ``delayed-1``."""
        return {"desync": f"desync-{self.step}x", "delayed": f"delayed-{self.step}"}.get(self.kind, self.kind)

    @property
    def spec(self) -> str:
        """The shortest string that parses back to this wiring."""
        layers = "" if not self.layers or len(self.layers) == self.num_layers else ":" + _format_layers(self.layers)
        return f"{self.name}{layers}" + (f"@{self.tp}" if self.tp else "")

    def kind_of(self, layer: int) -> str:
        return self.kind if layer in self._rewired else "standard"

    @cached_property
    def _rewired(self) -> frozenset[int]:
        return frozenset(self.layers)

    def check_tp(self, tp: int) -> None:
        """A rank-dependent checkpoint on another number of ranks would answer with plausible nonsense: refuse."""
        if self.tp is not None and tp != self.tp:
            raise ValueError(f"wiring {self.spec} was made for tp={self.tp}, this run has tp={tp}: run with tp={self.tp}")

    def check_same_weights(self, other: Wiring) -> None:
        """A parallel layer has one norm where the others have two: weights carry over only between equal sets of such layers."""
        ours, theirs = (set(wiring.layers) if wiring.kind == "parallel" else set() for wiring in (self, other))
        if ours != theirs:
            raise ValueError(
                f"cannot go from wiring {self.spec} to {other.spec}: a parallel layer has one norm where the others have two, so "
                f"weights do not carry over; train a parallel model from scratch"
            )

    def picture(self) -> str:
        """One character a layer: ``|`` standard, ``#`` rewired."""
        return "".join("#" if layer in self._rewired else "|" for layer in range(self.num_layers))

    def __str__(self) -> str:
        return self.spec


def _parse_name(name: str, spec: str) -> tuple[str, int]:
    kind, _, step = name.rpartition("-")
    if kind in LEAST_STEP and (match := re.fullmatch(r"([0-9]{1,7})x?" if kind == "desync" else r"([0-9]{1,7})", step)):
        return kind, int(match[1])
    if name in KINDS and name not in LEAST_STEP:
        return name, 0
    known = ("standard", "ladder", "parallel", "no-comm", "desync-2x", "desync-4x", "delayed-1")
    raise ValueError(f"unknown wiring {name!r:.60} in {spec!r:.80}{did_you_mean(name, known)}; examples: {EXAMPLES}")


def _parse_layers(text: str, num_layers: int, spec: str) -> Iterable[int]:
    chosen: set[int] = set()
    for item in text.split(","):
        item = item.strip()
        if item in ("last-half", "first-half"):
            item = f"{item.split('-')[0]}-{num_layers // 2}"
        if match := re.fullmatch(r"(last|first)-([0-9]{1,9})", item):
            count = int(match[2])
            if count > num_layers:
                raise ValueError(f"wiring {spec!r:.80}: {item} asks for {count} layers of a model that has {num_layers}")
            chosen.update(range(num_layers - count, num_layers) if match[1] == "last" else range(count))
        elif match := re.fullmatch(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", item):
            first, last = int(match[1]), int(match[2] or match[1])
            if first > last:
                raise ValueError(f"wiring {spec!r:.80}: the range {item} runs backwards; write {last}-{first}")
            if last >= num_layers:
                raise ValueError(_no_such_layer(f"wiring {spec!r:.80}", last, num_layers))
            chosen.update(range(first, last + 1))
        else:
            raise ValueError(
                f"wiring {spec!r:.80}: {item!r:.40} is not a layer (5), a range (16-31), last-half, first-half, last-K or first-K"
            )
    return chosen


def _format_layers(layers: tuple[int, ...]) -> str:
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][1] + 1:
            runs[-1][1] = layer
        else:
            runs.append([layer, layer])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def _no_such_layer(what: str, layer: int, num_layers: int) -> str:
    return f"{what} names layer {layer}, but the model has {num_layers} layers (0 to {num_layers - 1})"


def _whole(text: str, what: str) -> int:
    if not re.fullmatch(r"[0-9]{1,6}", text):
        raise ValueError(f"{what} must be a whole number, got {text!r:.40}")
    return int(text)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
