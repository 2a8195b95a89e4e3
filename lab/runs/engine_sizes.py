"""Sizes from 1B to 405B as emulated ranks (405B: one rank of TP=16), decode at batch 1; writes results/engine/sizes-*.json.

python -m lab.runs.engine_sizes --out results/engine --links 24us,64us
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

MODELS = (
    ("llama-3.2-1b", 8),
    ("llama-3.2-3b", 8),
    ("llama-3.1-8b", 8),
    ("codellama-34b", 8),
    ("llama-3-70b", 8),
    ("llama-3.1-405b", 16),
)


def main() -> None:
    from ladder_residual.bench.engine import bench_decode

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results/engine"))
    parser.add_argument("--links", default="24us,64us")
    parser.add_argument("--models", default=",".join(name for name, _ in MODELS))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for name, tp in MODELS:
        if name in options.models.split(","):
            result = bench_decode(
                model=name, tp=tp, links=tuple(options.links.split(",")), wirings=("standard", "ladder", "parallel")
            )
            (options.out / f"sizes-{name}-tp{tp}.json").write_text(json.dumps(result, indent=1) + "\n")
            print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
