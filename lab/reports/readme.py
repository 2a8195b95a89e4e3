"""The table of README.md: what ranks on hosts of their own gave, one row from each result."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from lab.reports.sources import ROOT, read_results
from ladder_residual.common.markdown import table

BLOCK = re.compile(r"(<!-- measured -->\n).*?(<!-- end -->)", re.S)


def pages() -> dict[str, str]:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return {"../../README.md": BLOCK.sub(lambda found: f"{found[1]}{measured_table()}{found[2]}", text)}


def measured_table() -> str:
    hosts, served, trained = (read_results(folder) for folder in ("hosts", "serve", "train"))
    smollm2 = hosts["smollm2-135m-batch8"]
    rows = [
        _row("decode step of SmolLM2-135M, batch 8", "1 ms, 1 Gbit/s", smollm2, "hosts", link="1 ms, 1 Gbit/s", phase="decode"),
        _row("prompt of 64 tokens, SmolLM2-135M", "1 ms, 1 Gbit/s", smollm2, "hosts", link="1 ms, 1 Gbit/s", phase="prefill"),
        _row("vLLM server, time per token, one request at a time", _one_way(served["cpu-tp2"]), served["cpu-tp2"], "serving", rate="one"),
        _row("training step, six layers of a 1B model", "5 ms, 100 Mbit/s", trained["cpu-tp2-100mbit"], "training"),
    ]  # fmt: skip
    return table(["two ranks, each on a host of its own", "link", "standard", "ladder", "speed-up", "details"], rows)


def _row(what: str, over: str, result: Mapping[str, Any], page: str, **wanted: object) -> list[str]:
    found = {row["wiring"]: row for row in result["rows"] if wanted.items() <= row.items()}
    times = [f"{row.get('median_ms', row.get('tpot_ms')):.1f} ms" for row in (found["standard"], found["ladder"])]
    return [what, over, *times, f"**{found['ladder']['speedup']:.2f}x**", f"[{page}](docs/results/{page}.md)"]


def _one_way(result: Mapping[str, Any]) -> str:
    return str(result["link"]).removesuffix(" one way")
