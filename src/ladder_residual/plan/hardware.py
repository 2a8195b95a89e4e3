"""Devices and links of the planner, from package data and the user's own TOML."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Annotated, Any

from ..common.recipe import Range, build_named
from ..common.suggest import did_you_mean
from ..links.link import Link, Microseconds
from ..links.parse import Links, parse_link, read_links, shipped_links
from ..links.table import tables

Rate = Annotated[float, Range(1e-9, 1e9)]
Share = Annotated[float, Range(1e-9, 1)]


@dataclass(frozen=True, kw_only=True)
class Device:
    """What the data sheet says, and the share of it that a good kernel reaches."""

    name: str
    title: str = ""
    memory_gb: Rate
    bandwidth_gbs: Rate
    tflops: Rate
    bandwidth_share: Share = 0.96
    flop_share: Share = 0.79
    batched_read_share: Share = 1.0  # of that bandwidth, what GEMMs of more than one row reach
    allreduce: str = ""  # the device's name in the all-reduce table, if it was measured
    engine: str = ""  # the engine profile this device implies (CPU hosts)
    # Gaps of a module as measured on this device, batch 1 and larger; 0: those of the engine profile.
    module_us: Microseconds = 0.0
    module_us_batched: Microseconds = 0.0


@dataclass(frozen=True)
class Hardware:
    """Everything the planner knows: shipped data, extended by the user's files."""

    devices: Mapping[str, Device]
    links: Links

    def device(self, name: str) -> Device:
        if name not in self.devices:
            choices = ", ".join(self.devices)
            raise ValueError(f"unknown device {name!r}{did_you_mean(name, self.devices)}; choose from {choices}")
        return self.devices[name]

    def link(self, text: str, device: Device) -> Link:
        """The link called ``text``; ``nccl`` and its like are looked up for this device."""
        library = self.links[text].library if text in self.links else ""
        measured = {library for owner, library in tables() if owner == device.allreduce}
        if library and library not in measured:
            fitting = [name for name, link in self.links.items() if link.library in {"", *measured}]
            raise ValueError(
                f"link {text} was not measured on device {device.name}; links for it: {', '.join(fitting)} "
                "(or add one: [links.NAME] alpha_us, bandwidth_gbs in a TOML file)"
            )
        link = parse_link(text, device=device.allreduce, links=self.links)
        if not link.pdl:
            raise ValueError(f"link {text}: the planner does not model how kernels are launched; leave out no-pdl")
        return link

    def extended(self, path: str | Path) -> Hardware:
        """With the devices and links of a TOML file; an existing name is replaced."""
        try:
            document = tomllib.loads(Path(path).read_text())
        except OSError as error:
            raise ValueError(f"cannot read hardware file {path}: {error.strerror}") from error
        except (ValueError, RecursionError) as error:
            raise ValueError(f"hardware file {path} is not valid TOML: {error}") from error
        strange = set(document) - {"devices", "links"}
        if strange or not document:
            found = ", ".join(map(repr, sorted(strange))) or "nothing"
            raise ValueError(f"hardware file {path}: expected [devices.NAME] and [links.NAME] tables, found {found:.60}")
        return self.with_tables(document, str(path))

    def with_tables(self, document: Mapping[str, Any], where: str) -> Hardware:
        devices = build_named(Device, document.get("devices", {}), "devices", where)
        return Hardware({**self.devices, **devices}, {**self.links, **read_links(document.get("links", {}), where)})


@cache
def shipped() -> Hardware:
    text = resources.files("ladder_residual").joinpath("assets/plan/devices.toml").read_text()
    return Hardware(build_named(Device, tomllib.loads(text)["devices"], "devices", "devices.toml"), shipped_links())
