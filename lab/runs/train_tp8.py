"""Training steps of one emulated rank of TP=8 on a GPU, forward and backward: standard against ladder over several links.

python -m lab.runs.train_tp8 --out results/train/tp8-emulated.json
"""

import argparse
import json
from pathlib import Path

from ladder_residual.bench.train import bench_train
from ladder_residual.distributed.world import distributed


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", default="llama-3.1-8b")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--tp", type=int, default=8)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--sequence", type=int, default=4096)
    parser.add_argument("--wirings", default="ladder,desync-2x")
    parser.add_argument("--links", default="h200-nccl;alpha=57,beta=14;alpha=46,beta=40")
    parser.add_argument("--repeats", type=int, default=12)
    parser.add_argument("--eager", action="store_true")
    options = parser.parse_args()
    with distributed() as world:
        result = bench_train(
            world,
            model=options.model,
            layers=options.layers,
            tp=options.tp,
            batch=options.batch,
            sequence=options.sequence,
            wirings=options.wirings.split(","),
            links=options.links.split(";"),
            repeats=options.repeats,
            dtype="bfloat16",
            compiled=not options.eager,
        )
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    for row in result["rows"]:
        print(f"{row['link']:32} {row['wiring']:10} {row['median_ms']:8.2f} ms  {row['speedup']:.3f}x")


if __name__ == "__main__":
    main()
