"""Prefill with fused kernels between the GEMMs against plain PyTorch; writes results/engine/70b-tp8-prefill-modules.json.

python -m lab.runs.engine_prefill --out results/engine

`ladder:79` is standard but for its last layer: where it differs from `standard`, something else than a wiring was measured.
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path
from statistics import median

import torch

from ladder_residual.bench.timing import spread, time_calls
from ladder_residual.common.environment import environment
from ladder_residual.engine.ops.prefill import FusedPrefillOps, PrefillOps
from ladder_residual.engine.random_rank import RandomRank
from ladder_residual.links import parse_link
from ladder_residual.plan.models import resolve_model

WIRINGS = ("standard", "ladder", "ladder:79")
MODULES = {"fused": FusedPrefillOps, "plain": PrefillOps}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results/engine"))
    parser.add_argument("--links", default="none;500us")
    parser.add_argument("--prompt", type=int, default=1024)
    parser.add_argument("--turns", type=int, default=7)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    rank = RandomRank(*resolve_model("llama-3-70b"), 8)
    tokens = torch.randint(0, rank.sizes.vocab_rows, (1, options.prompt), device="cuda")
    rows = []
    for name in options.links.split(";"):
        link = parse_link(name, tp=8)
        engines = {w: rank.engine(w, link, batch=1, max_context=options.prompt + 16, schedule="serial") for w in WIRINGS}
        taken: dict[tuple[str, str], list[float]] = {}
        for turn in range(options.turns):
            for modules, made in MODULES.items():
                for wiring, engine in engines.items():
                    engine.prefill_ops = made
                    once = time_calls(partial(engine.prefill, tokens), 1, warm_up=turn == 0)
                    taken.setdefault((modules, wiring), []).extend(once)
        for (modules, wiring), times in taken.items():
            rows.append(
                {
                    "batch": 1, "link": name, "modules": modules, "wiring": wiring, "ms": round(median(times), 2), **spread(times),
                    "over_standard": round(median(taken[modules, "standard"]) / median(times), 3),
                }
            )  # fmt: skip
            print(json.dumps(rows[-1]), flush=True)
        result = {
            "benchmark": "prefill", "emulated": True, "model": rank.name, "tp": 8, "prompt": options.prompt,
            "layers": rank.sizes.layers, "rows": rows, **environment(),
        }  # fmt: skip
        # after each link: half a result is better than none
        (options.out / "70b-tp8-prefill-modules.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
