"""Names of fields and tasks as people write them, and numbers as cells."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Where the general rule gives a poor name.
NAMES = {
    "no-comm": "no communication",
    "p25_ms": "lower quartile, ms",
    "p75_ms": "upper quartile, ms",
    "tp": "ranks (tp)",
    "ppl": "perplexity",
    "speedup": "speed-up",
    "pdl": "launched early (PDL)",
}
UNITS = {"ms": "ms", "us": "us", "s": "s", "seconds": "s", "gb": "GB", "percent": "%", "bytes": "bytes", "tflops": "TFLOP/s"}
FACTS = ("model", "layers", "tp", "batch", "prompt", "context", "gpu", "machine", "dtype", "torch", "date")


def readable(name: str) -> str:
    """``arc_easy`` -> ``arc easy``."""
    return NAMES.get(name, name.replace("_", " "))


def heading(name: str) -> str:
    """``prefill_ms`` -> ``prefill, ms``; ``tokens_per_second`` -> ``tokens/s``."""
    if name in NAMES:
        return NAMES[name]
    for ending in ("_per_second", "_per_s"):
        if name.endswith(ending):
            return f"{readable(name.removesuffix(ending))}/s"
    stem, _, unit = name.rpartition("_")
    return f"{readable(stem)}, {UNITS[unit]}" if stem and unit in UNITS else readable(name)


def facts_of(document: Mapping[str, Any]) -> str:
    """What a result says of its model and machine, in one line."""
    found = {"GPU" if name == "gpu" else name: document.get(name) for name in FACTS}
    return ", ".join(f"{word} {value}" for word, value in found.items() if isinstance(value, str | int | float))


def cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
