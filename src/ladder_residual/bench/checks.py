"""What cannot be measured, and what makes a result doubtful. No torch: the command line and reports use it too."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

PHASES = ("decode", "prefill", "e2e")
LEAST_REPEATS = 5


def check_repeats(repeats: int) -> None:
    if repeats < LEAST_REPEATS:
        raise ValueError(f"--repeats must be at least {LEAST_REPEATS} to say anything about spread, got {repeats}")


def check_name(name: str) -> None:
    """Of a device and a link that ``ladder bench calibrate`` writes."""
    if not re.fullmatch(r"[a-z0-9][a-z0-9-]{0,40}", name):
        raise ValueError(f"--name is lower-case letters, digits and '-', at most 41 of them; got {name!r}")


def _slow_reduces(rows: Sequence[Mapping[str, Any]], layers: int) -> list[str]:
    """An emulated all-reduce copies its message, and copying may take longer than the link it stands for. The time standard waits for
    each of its all-reduces shows that; its kernels may start a little later too, so a tenth is allowed. Links without PDL are
    longer on purpose."""
    field = "ms_per_token" if any("ms_per_token" in row for row in rows) else "ms"
    steps = {(row["batch"], row["link"]): row for row in rows if row["wiring"] == "standard"}
    found = []
    for (batch, link), row in steps.items():
        if (without := steps.get((batch, "none"))) is not None and link != "none" and row.get("pdl", True):
            waited = 1e3 * (row[field] - without[field]) / (2 * layers)
            if waited > 1.1 * row["link_us"] + 1:
                found.append(f"batch {batch}, {link}: all-reduces lasted {waited:.1f} us where the link says {row['link_us']}")
    return found


def warnings_of(result: Mapping[str, Any]) -> list[str]:
    """One line for each doubt about a result, in words."""
    rows = result["rows"]
    lines = []
    if rows and all("link_us" in row for row in rows):
        lines += _slow_reduces(rows, result["layers"])
    share = max((row["roofline_share"] for row in rows if "roofline_share" in row), default=0.0)
    if share > 1:
        fastest = share * result["read_bandwidth_tb_s"]
        lines.append(
            f"the read bandwidth was measured low: a step itself read {fastest:.3f} TB/s, so roofline shares are too high"
        )
    return lines
