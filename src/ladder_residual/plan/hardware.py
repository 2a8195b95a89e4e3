"""Devices and links, from package data and the user's own TOML. Unknown names list their near matches.

A device is what its data sheet says and the share of it a good kernel reaches. A link is the time of one all-reduce: a measured
table of that device (``nccl``, ``vllm`` ...) or latency + bandwidth.
"""

from __future__ import annotations

import difflib
import math
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from .allreduce_table import Curve, interpolate, tables


@dataclass(frozen=True, kw_only=True)
class Device:
    name: str
    title: str
    memory_gb: float
    bandwidth_gbs: float
    tflops: float
    bandwidth_share: float = 0.96
    flop_share: float = 0.79
    batched_read_share: float = 1.0  # of that bandwidth, what products of more than one row reach
    allreduce: str = ""  # the device's name in the all-reduce table, if it was measured
    engine: str = ""  # the engine profile this device implies (CPU hosts)
    module_us: float = 0.0  # gaps of a module as measured on this device, batch 1 and larger; 0: those of the engine profile
    module_us_batched: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Link:
    """Time of one all-reduce of ``bytes`` over ``ranks``, and how much it slows compute that runs beside it.

    ``in_situ_us`` is what a call costs inside a model beyond the back-to-back loop of a benchmark (launch, ranks arriving at
    different times). ``memory_contention`` and ``flop_contention`` are the shares of memory-bound and of FLOP-bound progress
    that compute loses while an all-reduce runs beside it.
    """

    name: str
    title: str
    alpha_us: float = 0.0
    bandwidth_gbs: float = math.inf
    ranks: int = 0  # number of ranks alpha_us was measured on; it grows with the depth of the tree. 0: it does not grow
    max_ranks: int = 4096
    in_situ_us: float = 0.0
    memory_contention: float = 0.0
    flop_contention: float = 0.0
    source: str = ""
    curves: Mapping[int, Curve] = field(default_factory=dict, repr=False)

    def us(self, size: float, ranks: int) -> float:
        """Microseconds of one all-reduce of ``size`` bytes (one rank's message)."""
        if ranks <= 1:
            return 0.0
        if ranks > self.max_ranks:
            raise ValueError(f"link {self.name} joins at most {self.max_ranks} ranks, tp={ranks} needs a link between nodes")
        if self.curves:
            return self.in_situ_us + self._from_curves(size, ranks)
        depth = math.log2(ranks) / math.log2(self.ranks) if self.ranks > 1 else 1.0
        wire_bytes = 2 * (ranks - 1) / ranks * size  # ring: every byte travels twice, less one's own share
        return self.in_situ_us + self.alpha_us * depth + wire_bytes / (self.bandwidth_gbs * 1e3)

    def _from_curves(self, size: float, ranks: int) -> float:
        counts = sorted(self.curves)
        if ranks in self.curves:
            return interpolate(self.curves[ranks], size)
        if not counts[0] < ranks < counts[-1]:
            raise ValueError(f"link {self.name} was measured on {_words(counts)} GPUs of this device, not on {ranks}")
        low = max(count for count in counts if count < ranks)
        high = min(count for count in counts if count > ranks)
        share = math.log(ranks / low) / math.log(high / low)
        low_us, high_us = interpolate(self.curves[low], size), interpolate(self.curves[high], size)
        return low_us * (1 - share) + high_us * share


@dataclass(frozen=True)
class Hardware:
    """Everything the planner knows: shipped data, extended by the user's files."""

    devices: Mapping[str, Device]
    link_rows: Mapping[str, Mapping[str, Any]]

    def device(self, name: str) -> Device:
        if name not in self.devices:
            raise ValueError(f"unknown device {name!r}{near(name, self.devices)}; choose from {', '.join(self.devices)}")
        return self.devices[name]

    def link(self, name: str, device: Device) -> Link:
        """The link by name; table links are looked up for this device."""
        row = self.link_rows.get(name)
        if row is None and (given := re.fullmatch(r"([0-9]{1,7}(?:\.[0-9]{1,3})?)us", name)):
            # "24us": any link by its time, for a question of the form "what if". It takes NCCL's contention.
            nccl = self.link_rows["nccl"]
            busy = {key: nccl[key] for key in ("memory_contention", "flop_contention")}
            return Link(
                name=name, title=f"{given[1]} us for every message", alpha_us=float(given[1]), source="given by hand", **busy
            )
        if row is None:
            names = list(self.link_rows)
            raise ValueError(
                f"unknown link {name!r}{near(name, names)}; choose from {', '.join(names)}, or a time such as 24us"
            )
        link = _make(Link, {"name": name, **{k: v for k, v in row.items() if k != "library"}}, f"link {name}")
        if "library" not in row:
            return link
        curves = tables().get((device.allreduce, row["library"]))
        if curves is None:
            measured = {library for owner, library in tables() if owner == device.allreduce}
            fitting = [n for n, r in self.link_rows.items() if r.get("library", "") in {"", *measured}]
            raise ValueError(
                f"link {name} was not measured on device {device.name}; links for it: {', '.join(fitting)} "
                "(or add one: [links.NAME] alpha_us, bandwidth_gbs in a TOML file)"
            )
        return replace(link, curves=curves, max_ranks=max(curves))

    def extended(self, path: str | Path) -> Hardware:
        """With the devices and links of a TOML file; an existing name is replaced."""
        try:
            document = tomllib.loads(Path(path).read_text())
        except OSError as error:
            raise ValueError(f"cannot read hardware file {path}: {error.strerror}") from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"hardware file {path} is not valid TOML: {error}") from error
        strange = set(document) - {"devices", "links"}
        if strange or not document:
            found = _words(sorted(strange)) or "nothing"
            raise ValueError(f"hardware file {path}: expected [devices.NAME] and [links.NAME] tables, found {found}")
        added = _read(document, str(path))
        return Hardware({**self.devices, **added.devices}, {**self.link_rows, **added.link_rows})


@cache
def shipped() -> Hardware:
    folder = resources.files("ladder_residual").joinpath("data/plan")
    devices = _read(tomllib.loads(folder.joinpath("devices.toml").read_text()), "devices.toml")
    links = _read(tomllib.loads(folder.joinpath("links.toml").read_text()), "links.toml")
    return Hardware(devices.devices, links.link_rows)


def _read(document: Mapping[str, Any], where: str) -> Hardware:
    devices: dict[str, Device] = {}
    links: dict[str, Mapping[str, Any]] = {}
    for kind in ("devices", "links"):
        for name, row in dict(document.get(kind, {})).items():
            if not isinstance(row, Mapping):
                raise ValueError(f"{where}: {kind}.{name} must be a table such as [{kind}.{name}], got {row!r:.60}")
            row = {"title": name, **row}
            if kind == "devices":
                devices[name] = _make(Device, {"name": name, **row}, f"{where}: device {name}")
            else:
                plain = {k: v for k, v in row.items() if k != "library"}
                made = _make(Link, {"name": name, **plain}, f"{where}: link {name}")
                if "library" not in row and made.alpha_us == 0 and math.isinf(made.bandwidth_gbs):
                    raise ValueError(f"{where}: link {name} needs alpha_us (microseconds) and bandwidth_gbs (GB/s)")
                links[name] = row
    return Hardware(devices, links)


def _make(kind: type, row: Mapping[str, Any], where: str) -> Any:
    """The dataclass from a TOML table; names the field that is missing, unknown, not a number or not positive."""
    known = {f.name: f for f in fields(kind) if f.name != "curves"}
    for key, value in row.items():
        if key not in known:
            raise ValueError(f"{where} has an unknown field {key!r}{near(key, known)}; known: {', '.join(known)}")
        wants_text = str(known[key].type) == "str"
        if wants_text != isinstance(value, str) or isinstance(value, bool):
            raise ValueError(f"{where}: {key} must be {'text' if wants_text else 'a number'}, got {value!r:.60}")
        if isinstance(value, int | float) and not value >= 0:
            raise ValueError(f"{where}: {key} must not be negative, got {value!r}")
        if key.endswith(("_contention", "_share")) and not 0 <= float(value) <= 1:
            raise ValueError(f"{where}: {key} is a share from 0 to 1, got {value!r}")
        if key.endswith("_contention") and value == 1:
            raise ValueError(f"{where}: {key} = 1 would stop all compute beside an all-reduce; give less than 1")
    for key in ("memory_gb", "bandwidth_gbs", "tflops") if kind is Device else ():
        if row.get(key, 0) <= 0:
            raise ValueError(f"{where} needs {key}, a number above 0, got {row.get(key)!r}")
    if kind is Link and row.get("bandwidth_gbs", 1) == 0:
        raise ValueError(f"{where}: bandwidth_gbs must be above 0")
    return kind(**row)


def near(name: str, choices: Iterable[str]) -> str:
    matches = difflib.get_close_matches(name.lower(), list(choices), n=3, cutoff=0.5)
    return f" (near: {', '.join(matches)})" if matches else ""


def _words(items: Iterable[object]) -> str:
    return ", ".join(str(item) for item in items)
