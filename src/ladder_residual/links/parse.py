"""Links by name. A name means the same time in the planner, on an emulated rank and in every benchmark.

``none`` takes no time, ``24us`` 24 microseconds for every message, ``alpha=12,beta=90`` 12 microseconds + bytes / 90 GB/s on any number
of ranks. ``ib-2-nodes`` is a link of ``assets/plan/links.toml`` or of the user's TOML file. ``h200-nccl`` is NCCL's all-reduce as
measured on 2, 4 and 8 H200 (other devices and libraries: ``assets/plan/allreduce.csv``). With ``,no-pdl`` behind it a link is a kernel
that is not launched early, as NCCL's are not: it starts when its message is complete, and nothing that waits for it starts before its end.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from importlib import resources
from typing import Any

from ..common.recipe import build_named
from ..common.suggest import did_you_mean
from .link import Link
from .table import tables

LINK_FORMS = (
    "none, 24us, alpha=12,beta=90 (microseconds and GB/s), a name such as ib-2-nodes or h200-nccl, each with ,no-pdl behind it"
)
_NUMBER = r"[0-9]{1,9}(?:\.[0-9]{1,9})?"

Links = Mapping[str, Link]  # by name; those with a library take their curves from the table of all-reduces when they are parsed


@cache
def shipped_links() -> Links:
    text = resources.files("ladder_residual").joinpath("assets/plan/links.toml").read_text()
    return read_links(tomllib.loads(text)["links"], "links.toml")


def read_links(tables: Any, where: str) -> Links:
    """The ``[links.NAME]`` tables of a TOML file."""
    links = build_named(Link, tables, "links", where)
    for name, link in links.items():
        if link.curves:
            raise ValueError(f"{where}: links.{name}: curves cannot be given; write alpha_us and bandwidth_gbs")
        if not link.library and link.silent:
            raise ValueError(f"{where}: links.{name} needs alpha_us (microseconds) and bandwidth_gbs (GB/s)")
    return links


def parse_link(text: str, *, tp: int | None = None, device: str = "", links: Links | None = None) -> Link:
    """The link called ``text``. ``device`` is the one whose measurements a bare ``nccl`` means, by its name in the table of
    all-reduces; ``links`` are the known ones, by default those of the package. A ``tp`` that the link was not measured on is refused."""
    links = shipped_links() if links is None else links
    plain, *flags = re.split(r"\s*,\s*(?=no-pdl)", text.strip())
    link = _parse(plain, device, links)
    if flags:
        if link.silent or flags != ["no-pdl"]:
            raise ValueError(f"link {text!r:.60}: no-pdl stands once, behind a link that takes time, as in 24us,no-pdl")
        link = replace(link, name=f"{link.name},no-pdl", pdl=False)
    if tp is not None:
        link.us(1, tp)
    return link


def _parse(text: str, device: str, links: Links) -> Link:
    if text in links:
        return _measured(links[text], device) if links[text].library else links[text]
    text = text.lower()
    if text in ("none", "0", "0us"):
        return Link(name="none", title="no time")
    # A link that is only given by its time takes as much from compute as NCCL does.
    nccl = links["nccl"]
    given = Link(name=text, memory_contention=nccl.memory_contention, flop_contention=nccl.flop_contention)
    if match := re.fullmatch(rf"({_NUMBER})\s*us", text):
        return replace(given, title=f"{match[1]} us for every message", alpha_us=float(match[1]))
    if match := re.fullmatch(rf"alpha=({_NUMBER}),\s*beta=({_NUMBER})", text):
        alpha, beta = map(float, match.groups())
        if beta == 0:
            raise ValueError(f"link {text!r:.60}: beta is a bandwidth in GB/s and must be above 0")
        title = f"{alpha:g} us + bytes / {beta:g} GB/s"
        return replace(given, title=title, alpha_us=alpha, bandwidth_gbs=beta, ring=False)
    owner, _, library = text.partition("-")
    on = next((device for device, _ in tables() if owner in (device, device.removesuffix("_sxm"))), None)
    if on and library:
        link = links.get(library, Link(name=library, library=library))
        return _measured(replace(link, name=f"{on.removesuffix('_sxm')}-{library}"), on)
    raise ValueError(f"unknown link {text!r:.60}{did_you_mean(text, links)}; write {LINK_FORMS}; links: {', '.join(links)}")


def _measured(link: Link, device: str) -> Link:
    """With what was measured on a device of the table."""
    curves = tables().get((device, link.library))
    if curves is None and not device:
        raise ValueError(f"link {link.name} is measured on each device: write which, as in h200-{link.name}")
    if curves is None:
        known = ", ".join(library for owner, library in tables() if owner == device)
        raise ValueError(f"link {link.name} was not measured on {device}; measured there: {known}")
    return replace(link, curves=curves, max_ranks=max(curves))
