"""The table of README.md: what two real ranks gave, one row from each result."""

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
    hosts, served, trained, engine = (read_results(folder) for folder in ("hosts", "serve", "train", "engine"))
    smollm2 = hosts["smollm2-135m-batch8"]
    one, sixteen = (engine[f"real-8b-tp2{batch}"] for batch in ("", "-batch16"))
    rows = [
        _row("decode step of Llama-3.1-8B on a GPU, batch 1", "NCCL over sockets", one, "real-ranks", reducer="nccl"),
        _row("the same, batch 16", "NCCL over sockets", sixteen, "real-ranks", reducer="nccl"),
        _row("the same, batch 1", "symmetric memory, 5 us", one, "real-ranks", reducer="symm"),
        _row("vLLM on a GPU, Llama-3.1-8B, a token at batch 16", "NCCL over sockets", _vllm(served, "batch 16"), "serving"),
        _row("decode step of SmolLM2-135M, batch 8", "1 ms, 1 Gbit/s", smollm2, "hosts", link="1 ms, 1 Gbit/s", phase="decode"),
        _row("training step, six layers of a 1B model", "5 ms, 100 Mbit/s", trained["cpu-tp2-100mbit"], "training"),
    ]  # fmt: skip
    return table(["two ranks", "link", "standard", "ladder", "speed-up", "details"], rows)


def _row(what: str, over: str, result: Mapping[str, Any], page: str, **wanted: object) -> list[str]:
    found = {row["wiring"]: row for row in result["rows"] if wanted.items() <= row.items()}
    times = [f"{_milliseconds(row):.1f} ms" for row in (found["standard"], found["ladder"])]
    ratio = found["ladder"].get("speedup", found["ladder"].get("over_standard"))
    return [what, over, *times, f"**{ratio:.2f}x**", f"[{page}](docs/results/{page}.md)"]


def _vllm(served: Mapping[str, Any], measurement: str) -> dict[str, Any]:
    """vLLM's own model and the plugin in the part with NCCL, as rows."""
    times = next(row["ms"] for row in served["gpu-nccl-tp1"]["parts"]["nccl"]["rows"] if row["name"] == measurement)
    own, ladder = times["nccl-own"], times["nccl-ladder"]
    rows = [{"wiring": "standard", "ms": own}, {"wiring": "ladder", "ms": ladder, "over_standard": own / ladder}]
    return {"rows": rows}


def _milliseconds(row: Mapping[str, Any]) -> float:
    return float(next(row[name] for name in ("median_ms", "tpot_ms", "ms") if name in row))
