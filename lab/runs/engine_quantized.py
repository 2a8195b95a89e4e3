"""Decode with quantised weights on one GPU, beside bf16 in the same run; writes results/engine/quantized*.json.

python -m lab.runs.engine_quantized --out results/engine

``quantized.json``: Llama-3.1-8B on the whole card, batches 1 and 16, each format's time, share of its own roofline and gain over bf16.
``quantized-70b-tp8-*.json``: a rank of Llama-3-70B at TP=8, all-reduces emulated. Real ranks are a part of
``lab.runs.engine_real_ranks`` (``--parts 8b-tp2-fp8``).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

CONTEXT = 1280


def whole(model: str, batches: tuple[int, ...], repeats: int) -> dict[str, Any]:
    """Every format in turn; the card's weights are freed between them."""
    from ladder_residual.bench.engine import bench_decode
    from ladder_residual.engine import RANDOM_WEIGHTS

    rows: list[dict[str, Any]] = []
    result: dict[str, Any] = {}
    for weights in RANDOM_WEIGHTS:
        result = bench_decode(
            model=model,
            tp=1,
            batches=batches,
            wirings=("standard",),
            links=("none",),
            context=CONTEXT,
            repeats=repeats,
            weights=weights,
        )
        plain = {row["batch"]: row["ms_per_token"] for row in rows if row["format"] == "bf16"}
        of_format = {name: result.pop(name) for name in ("gigabytes_per_step_batch_1", "read_bandwidth_tb_s")}
        for row in result["rows"]:
            over = round(plain[row["batch"]] / row["ms_per_token"], 4) if plain else 1.0
            rows.append({"format": weights, **of_format, **row, "over_bf16": over})
    return {**result, "weights": "random", "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results/engine"))
    parser.add_argument("--parts", default="whole,rank")
    parser.add_argument("--repeats", type=int, default=40)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    parts = options.parts.split(",")

    def keep(name: str, result: dict[str, Any]) -> None:
        (options.out / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
        for row in result["rows"]:
            print(name, json.dumps(row), flush=True)

    if "whole" in parts:
        keep("quantized", whole("llama-3.1-8b", (1, 16), options.repeats))
    if "rank" in parts:
        from ladder_residual.bench.engine import bench_decode

        asked = dict(model="llama-3-70b", tp=8, links=("none", "5us", "24us", "64us"), context=CONTEXT, repeats=options.repeats)
        for weights in ("bf16", "fp8", "int4"):
            keep(f"quantized-70b-tp8-{weights}", bench_decode(**asked, weights=weights))


if __name__ == "__main__":
    main()
