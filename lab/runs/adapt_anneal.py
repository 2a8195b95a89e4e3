"""Switching a wiring at once against annealing it, at equal tokens, on the demo model; writes results/adapt/anneal.json.

python -m lab.runs.adapt_anneal --out results/adapt/anneal.json
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import ladder_residual as ladder
from ladder_residual.common.environment import environment

SHARES = (0.0, 0.15, 0.3, 0.5)  # of the run; 0: at once


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results/adapt/anneal.json"))
    parser.add_argument("--tokens", type=int, default=65_536)
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    result: dict[str, Any] = {
        "benchmark": "anneal",
        "model": "demo",
        "wiring": "ladder",
        "tokens": arguments.tokens,
        "rows": [],
    }
    result |= environment()
    with tempfile.TemporaryDirectory() as scratch:
        original, student = Path(scratch, "stories"), Path(scratch, "ladder")
        ladder.export_demo(str(original))
        ladder.convert(original, student, "ladder")
        for seed in range(arguments.seeds):
            for share in SHARES:
                run = ladder.adapt(
                    student,
                    teacher=original,
                    data=original / "stories.txt",
                    out=Path(scratch, f"{seed}-{share}"),
                    tokens=arguments.tokens,
                    holdout=0.3,
                    sequence=128,
                    batch_tokens=1024,
                    learning_rate=1e-3,
                    seed=seed,
                    anneal=share,
                    progress=False,
                    device="cpu",
                    log=lambda line: None,
                )
                ((before, after),) = ((run.before[name], run.after[name]) for name in run.after)
                result["rows"].append({"seed": seed, "share": share, "before": before, "after": after, "seconds": run.seconds})
                print(json.dumps(result["rows"][-1]), flush=True)
                arguments.out.parent.mkdir(parents=True, exist_ok=True)
                arguments.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
