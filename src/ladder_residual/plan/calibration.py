"""From measurements to constants: an engine's gaps from a step without communication, a link from timed messages, as TOML.

What a constant was calibrated on is never counted as a check of it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

from .cost import EngineProfile, Phase
from .planner import TWO_STREAM, Case


def with_measured_step(case: Case, phase: Phase, measured_ms: float) -> EngineProfile:
    """The engine whose standard step without all-reduces takes ``measured_ms``: the gaps of a module take up the difference."""
    field = "module_us" if phase.rows == 1 else "module_us_batched"
    bare = replace(case, engine=replace(case.engine, **{field: 0.0}))  # type: ignore[arg-type]
    left = 1e3 * measured_ms - bare.timeline("no-comm", phase).us
    gaps = max(0.0, left / (2 * case.model.num_layers))
    return replace(case.engine, **{field: gaps})  # type: ignore[arg-type]


def with_measured_overlap(case: Case, phase: Phase, measured_ms: float) -> EngineProfile:
    """The engine whose two-stream step without all-reduces takes ``measured_ms`` (as near as two streams can get)."""
    low, high = 1e-6, 1.0

    def ms(overlap: float) -> float:
        return replace(case, engine=replace(case.engine, stream_overlap=overlap)).timeline(TWO_STREAM, phase).us / 1e3

    for _ in range(30):  # a better overlap is never slower, so halving finds it
        middle = (low + high) / 2
        low, high = (low, middle) if ms(middle) <= measured_ms else (middle, high)
    return replace(case.engine, stream_overlap=high)


def fit_link(samples: Sequence[tuple[float, float]], ranks: int) -> tuple[float, float]:
    """(alpha_us, bandwidth_gbs) of timed all-reduces (bytes, microseconds), least squares of the relative error."""
    if ranks < 2:
        raise ValueError(f"a link joins at least 2 ranks, got {ranks}")
    if len({size for size, _ in samples}) < 2:
        raise ValueError("a link needs timings of at least two message sizes")
    if any(not (size > 0 and us > 0) for size, us in samples):
        raise ValueError("message sizes and times must be above 0")
    import numpy as np

    # Weighted by 1 / time, so that large messages do not drown the latency.
    terms = [(1 / us, 2 * (ranks - 1) / ranks * size / us) for size, us in samples]
    alpha, per_byte = map(float, np.linalg.lstsq(np.array(terms), np.ones(len(terms)), rcond=None)[0])
    if per_byte <= 0:
        raise ValueError("larger messages were not slower: time larger ones, the bandwidth cannot be seen in these")
    return max(0.0, alpha), 1e-3 / per_byte


def link_toml(name: str, samples: Sequence[tuple[float, float]], ranks: int, source: str) -> str:
    """A [links.NAME] table for ``--hardware``."""
    alpha, bandwidth = fit_link(samples, ranks)
    title = f"measured, {ranks} ranks"
    return _table(f"links.{name}", title=title, alpha_us=alpha, bandwidth_gbs=bandwidth, ranks=ranks, source=source)


def device_toml(name: str, *, source: str, read_gbs: float, **measured: float | str) -> str:
    """A [devices.NAME] table from fields of ``Device``; measured rates are what is achieved, so their shares are 1."""
    return _table(f"devices.{name}", title=source, bandwidth_gbs=read_gbs, bandwidth_share=1.0, flop_share=1.0, **measured)


def _table(heading: str, **values: float | str) -> str:
    """In TOML; a JSON string is one of TOML as well."""
    lines = (f"{key} = {json.dumps(value) if isinstance(value, str) else f'{value:.5g}'}\n" for key, value in values.items())
    return f"[{heading}]\n{''.join(lines)}"
