"""The fitted constants: what each means, which points it was fitted on, and the fit itself (``python -m lab.planner constants --refit``).

Least squares on the logarithm of predicted / measured over the points marked ``fit`` in paper.json and emulated.json. The shipped values in
``engines.toml`` and ``links.toml`` are the rounded result; a test runs the fit again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lab.planner.points import Point, emulated_points, paper_points
from ladder_residual.links import Link
from ladder_residual.plan.cost import EngineProfile, engines
from ladder_residual.plan.hardware import shipped

TABLE = "70B, TP8, NVLink, batch 1 and 64: standard, ladder, no-comm; batch 4 no-comm; TP2 no-comm"


@dataclass(frozen=True)
class Constant:
    family: str  # engine or link
    owner: str
    name: str
    meaning: str
    fitted_on: str
    data: str = "paper"  # which points: paper, emulated or engine

    @property
    def key(self) -> str:
        return f"{self.owner}.{self.name}"

    @property
    def shipped(self) -> float:
        if self.family == "engine":
            return float(getattr(engines()[self.owner], self.name))
        hardware = shipped()
        return float(getattr(hardware.link(self.owner, hardware.device("h100")), self.name))


P2P_OFF = "70B, P2P off: standard, batch 1 and 64"
NODES = "405B: no-comm, batch 1 and 16"
NODES_OFF = "405B, P2P off: no-comm, batch 1 and 16"
EMULATED = "emulated"
ENGINE = "engine"  # results/engine; fitted when those are made, by `calibration.py`

CONSTANTS = (
    Constant("engine", "paper", "read_share", "share of the achieved bandwidth its kernels read at", TABLE),
    Constant("engine", "paper", "module_us", "gaps and small kernels of a module at batch 1, us", TABLE),
    Constant("engine", "paper", "module_us_batched", "the same at batch > 1, us", TABLE),
    Constant("engine", "paper", "multiply_share", "share of the achieved FLOP rate in prefill", TABLE),
    Constant("link", "nccl", "in_situ_us", "cost of a call inside a model above nccl-tests, us", TABLE),
    Constant("link", "nccl", "memory_contention", "share of memory-bound progress lost beside NCCL", TABLE),
    Constant(
        "link", "nccl", "flop_contention", "share of FLOP-bound progress lost beside NCCL", TABLE + "; ladder prefill gain"
    ),
    Constant("link", "nccl-no-p2p", "alpha_us", "latency with P2P off, us", P2P_OFF),
    Constant("link", "nccl-no-p2p", "bandwidth_gbs", "bus bandwidth with P2P off, GB/s", P2P_OFF),
    Constant(
        "link", "nccl-no-p2p", "memory_contention", "as above, beside NCCL with P2P off", "70B, P2P off: ladder, batch 64"
    ),
    Constant("link", "ib-2-nodes", "alpha_us", "latency over two nodes, us", NODES),
    Constant("link", "ib-2-nodes", "bandwidth_gbs", "bus bandwidth over two nodes, GB/s", NODES),
    Constant("link", "ib-2-nodes-no-p2p", "alpha_us", "the same with P2P off, us", NODES_OFF),
    Constant("link", "ib-2-nodes-no-p2p", "bandwidth_gbs", "the same with P2P off, GB/s", NODES_OFF),
    Constant("engine", "compiled", "module_us", "as above, torch.compile per block", "batch 1, no all-reduce", EMULATED),
    Constant("engine", "compiled", "module_us_batched", "as above", "batch 16, no all-reduce", EMULATED),
    Constant("engine", "prototype", "module_us", "as above, prototype kernels", "batch 1, no all-reduce", EMULATED),
    Constant("engine", "prototype", "stream_overlap", "how well two streams fill gaps", "two-stream, no all-reduce", EMULATED),
    Constant(
        "link", "emulated", "in_situ_us", "cost of an emulated call above its wait, us", "prototype, standard, 10 us", EMULATED
    ),
    Constant(
        "link", "emulated", "memory_contention", "as above, beside a waiting kernel", "prototype, ladder, 24 us", EMULATED
    ),
    Constant("engine", "fused", "module_us", "as above, our Triton kernels", "batch 1, no all-reduce", ENGINE),
    Constant("engine", "fused", "module_us_batched", "as above", "batch 16, no all-reduce", ENGINE),
    Constant(
        "engine", "fused", "stream_overlap", "how well two streams fill gaps", "batch 1, two-stream, no all-reduce", ENGINE
    ),
)
# Chosen by hand, not fitted: (what, value, why). The form of the model (contention also on gaps, another contention with P2P
# off) was chosen with the paper's tables in view, checked points included; the constants above were fitted on fit points alone.
ASSUMED = (
    (
        "attention_share",
        "0.6 (paper, fused, prototype), 0.5 (compiled)",
        "share of a layer's small kernels that attention has, counted roughly",
    ),
    ("compiled.read_share", "0.75", "from a kernel breakdown: matrix kernels of a layer take 73 us where their bytes take 46"),
    ("kv_reads_per_head", "paper, compiled", "both expand the KV heads to the query heads before attention"),
    ("TILE_ROWS", "64", "rows of one tile of the matrix units"),
    (
        "parallel_saving",
        "1/3; 0 (fused)",
        "two of about six small kernels of a module go away when attention and MLP share their input; in the "
        "serial schedule of this project's engine they do not, as its results without all-reduces show (interleaved, it takes 6 % less "
        "time: not in the plan)",
    ),
    ("bandwidth_share, flop_share", "0.96, 0.79", "measured on an H200, taken over to devices nobody measured"),
)
# Links that were not measured beside compute take the contention of the link they are most like.
INHERIT = {"ib-2-nodes": "nccl", "ib-2-nodes-no-p2p": "nccl-no-p2p"}


def points_with(values: Mapping[str, float], data: str) -> list[Point]:
    """The points of ``data``, predicted with other constants than the shipped ones."""

    def link_of(link: Link) -> Link:
        own: dict[str, Any] = {
            c.name: values[c.key] for c in CONSTANTS if (c.family, c.owner) == ("link", link.name) and c.key in values
        }
        if "nccl.flop_contention" in values and link.name != "emulated":
            own["flop_contention"] = values["nccl.flop_contention"]
        if link.name in INHERIT:
            own["memory_contention"] = values[f"{INHERIT[link.name]}.memory_contention"]
        return replace(link, **own)

    def engine_of(name: str) -> EngineProfile:
        own: dict[str, Any] = {
            c.name: values[c.key] for c in CONSTANTS if (c.family, c.owner) == ("engine", name) and c.key in values
        }
        return replace(engines()[name], **own)

    return (paper_points if data == "paper" else emulated_points)(engine_of, link_of)


def fit(data: str, rounds: int = 12) -> dict[str, float]:
    """Gauss-Newton from the shipped values; returns constant -> fitted value."""
    import numpy as np

    names = [c.key for c in CONSTANTS if c.data == data]
    start = [c.shipped for c in CONSTANTS if c.data == data]

    def residuals(logs: Sequence[float]) -> np.ndarray:
        values = dict(zip(names, np.exp(logs).tolist(), strict=True))
        points = [p for p in points_with(values, data) if p.role == "fit" and not _adds_nothing(p)]
        return np.array([math.log(p.predicted() / p.measured) for p in points])

    logs = np.log(np.array(start))
    for _ in range(rounds):
        here = residuals(logs)
        step = 1e-3
        slopes = np.array([(residuals(logs + step * unit) - here) / step for unit in np.eye(len(logs))]).T
        # A little damping keeps a constant that hardly matters from wandering.
        change = np.linalg.solve(slopes.T @ slopes + 1e-5 * np.eye(len(logs)), -slopes.T @ here)
        change = np.clip(change, -0.3, 0.3)
        logs = logs + change
        if np.abs(change).max() < 1e-3:
            break
    return dict(zip(names, np.exp(logs).tolist(), strict=True))


def _adds_nothing(point: Point) -> bool:
    """Another form of numbers that are fitted already: quotients of two of them, the decode part of the same runs."""
    quotient = point.group.startswith("70B") and point.quantity == "speedup"
    return point.source == "paper" and (quotient or point.quantity == "decode_speedup")
