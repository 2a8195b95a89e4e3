"""The 70B table on one GPU (emulated rank of TP=8) and the one-GPU peers; writes results/engine/*.json.

python -m lab.runs.engine_70b --out results/engine
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from lab.peers.measure import decode_and_peers, e2e_and_peers, prefill_and_peers, whole_model
from lab.profile import bench_profile
from ladder_residual.bench.engine import bench_decode, bench_e2e, bench_prefill
from ladder_residual.engine.random_rank import RandomRank
from ladder_residual.plan.models import resolve_model

# the paper's exposed latencies are 24 us (NVLink) and 64 us (no NVLink) at batch 1; NCCL's 18 us; one-shot kernels 5 us
LINKS = ("none", "5us", "18us", "24us", "64us")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results/engine"))
    parser.add_argument("--parts", default="bound,batch1,no-pdl,gemm,batches,beside,prefill,e2e,profile,whole,peers")
    parser.add_argument("--gemm-backend", default="auto", help="of batches 2 to 16: cublas, triton or auto")
    parser.add_argument("--repeats", type=int, default=40)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    parts = options.parts.split(",")

    def keep(name: str, result: dict) -> None:
        (options.out / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
        for row in result["rows"]:
            print(name, json.dumps(row), flush=True)

    if "peers" in parts:
        keep("8b-tp1-peers", whole_model(repeats=options.repeats))
    if "whole" in parts:  # the same model on the whole card, without its peers
        asked = dict(model="llama-3.1-8b", tp=1, links=("none",), context=1100, repeats=options.repeats)
        keep("8b-tp1-decode", bench_decode(**asked))
    if set(parts) & {"bound", "batch1", "no-pdl", "gemm", "batches", "beside", "prefill", "e2e", "profile"}:
        rank = RandomRank(*resolve_model("llama-3-70b"), 8)
        every = ("standard", "ladder", "parallel", "desync-2x", "no-comm")
        if "bound" in parts:  # the figure with the least room, by itself: cards differ
            few = bench_decode(rank=rank, tp=8, links=("none", "5us"), repeats=5 * options.repeats)
            keep("70b-tp8-bound", few)
        if "batch1" in parts:
            keep(
                "70b-tp8-batch1",
                bench_decode(rank=rank, tp=8, links=LINKS, wirings=every, repeats=options.repeats),
            )
        if "no-pdl" in parts:  # all-reduces that are not launched early, as NCCL's are
            links = ("none", *(f"{link},no-pdl" for link in LINKS[1:]))
            keep(
                "70b-tp8-no-pdl",
                bench_decode(rank=rank, tp=8, links=links, wirings=("standard", "ladder"), repeats=options.repeats),
            )
        if "beside" in parts:  # what a user would have otherwise
            keep("70b-tp8-peers", decode_and_peers(rank, batches=(1, 4), repeats=options.repeats))
            keep("70b-tp8-prefill-peers", prefill_and_peers(rank))
            keep("70b-tp8-e2e-peers", e2e_and_peers(rank, repeats=2))
        if "batches" in parts:  # a file of its own as soon as it is there, those with a target first
            for batch in (16, 64, 4):
                keep(
                    f"70b-tp8-batch{batch}",
                    bench_decode(
                        rank=rank, tp=8, batches=(batch,), links=LINKS, wirings=("standard", "ladder", "parallel"),
                        gemm_backend=options.gemm_backend, repeats=options.repeats,
                    ),
                )  # fmt: skip
        if "gemm" in parts:  # cuBLAS and kernels of our own, no link in the way
            for backend in ("cublas", "triton"):
                keep(
                    f"70b-tp8-gemm-{backend}",
                    bench_decode(
                        rank=rank, tp=8, batches=(2, 4, 8, 16), links=("none",), wirings=("standard", "ladder"),
                        gemm_backend=backend, repeats=options.repeats,
                    ),
                )  # fmt: skip
        if "prefill" in parts:
            rows = []
            for batch in (1, 4):  # kept as soon as they are there
                result = bench_prefill(rank=rank, tp=8, batches=(batch,), links=("none", "500us", "h200-nccl"))
                rows += result["rows"]
                keep("70b-tp8-prefill", {**result, "rows": rows})
        if "e2e" in parts:  # about half a minute each
            for batch in (1, 4, 16, 64):
                keep(f"70b-tp8-e2e-batch{batch}", bench_e2e(rank=rank, tp=8, batches=(batch,), links=("24us",), repeats=2))
        if "profile" in parts:  # behind all that is timed: a profiler, once on, slows down what comes after it
            keep("70b-tp8-profile", bench_profile(rank=rank))
        del rank


if __name__ == "__main__":
    main()
