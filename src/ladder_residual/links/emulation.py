"""``--emulate``: which rank stands alone, and what takes the place of its all-reduces."""

from __future__ import annotations

import re
from dataclasses import dataclass

from .link import Link
from .parse import parse_link

EMULATION_FORMS = "tp=8,link=h200-nccl, tp=8,link=24us or tp=8,alpha=12,beta=90, each with ,no-pdl behind it"


@dataclass(frozen=True)
class Emulation:
    """Rank 0 of ``tp`` ranks that are not there."""

    tp: int
    link: Link

    def __str__(self) -> str:
        return f"emulated rank of tp={self.tp}, link {self.link.name}"


def parse_emulation(text: str) -> Emulation:
    """``tp=8,link=24us``; whatever is timed so is an *emulated* result and labelled so."""
    parts = [part.strip() for part in text.split(",")]
    ranks = [part for part in parts if part.startswith("tp=")]
    link = ",".join(part for part in parts if part not in ranks)
    if len(ranks) != 1 or not re.fullmatch(r"tp=[0-9]{1,4}", ranks[0]) or not link.startswith(("link=", "alpha=")):
        raise ValueError(f"cannot emulate {text!r:.60}: write {EMULATION_FORMS}")
    tp = int(ranks[0].removeprefix("tp="))
    if tp < 2:
        raise ValueError(f"cannot emulate {text!r:.60}: one rank has nobody to reduce with; give tp at least 2")
    return Emulation(tp, parse_link(link.removeprefix("link="), tp=tp))
