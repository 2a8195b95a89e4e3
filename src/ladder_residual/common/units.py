"""Times as users write them."""

from __future__ import annotations

_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
MOST_SECONDS = 60


def read_seconds(text: str) -> float | None:
    """``500us``, ``2ms``, ``0`` or ``none`` in seconds; None for ``auto``."""
    if text == "auto":
        return None
    if text == "none":
        return 0.0
    unit = next((unit for unit in _UNITS if text.endswith(unit)), "")
    try:
        value = float(text.removesuffix(unit)) * _UNITS.get(unit, 1.0)
    except ValueError:
        raise ValueError(f"cannot read the latency {text!r}; write e.g. 500us, 2ms, 0 or auto") from None
    if not unit and value != 0:
        raise ValueError(f"the latency {text!r} has no unit; write e.g. 500us or 2ms")
    if not 0 <= value <= MOST_SECONDS:
        raise ValueError(f"a latency is between 0 and {MOST_SECONDS} s, got {text}")
    return value
