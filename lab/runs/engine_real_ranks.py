"""The CUDA engine and training on real ranks that share this machine's GPU; writes results/engine/real-*.json and results/train/.

    nvidia-cuda-mps-control -d
    python -m lab.runs.engine_real_ranks --out results

Each part is one ``ladder bench`` command, which is printed. The emulated twins run one rank alone with the share of SMs that each real
rank has, and with the all-reduce times that the real ranks measured.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from ladder_residual.distributed.shared_gpu import SM_PERCENTAGE

EVERY = "standard,ladder,ladder:last-half,parallel,desync-2x,delayed-1"
DECODE = "--prompt 768 --new 512 --repeats 40"
TRAIN = "--tp 2 --batch 2 --sequence 1024 --vocabulary 4096 --wirings standard,ladder --repeats 8"
# name: (folder, arguments of ladder bench, percent of the SMs for each rank; None: an equal share)
PARTS: dict[str, tuple[str, str, int | None]] = {
    "8b-tp2": ("engine", f"decode --model llama-3.1-8b --tp 2 --wirings {EVERY} {DECODE}", None),
    "8b-tp2-batch16": (
        "engine",
        f"decode --model llama-3.1-8b --tp 2 --batch 16 --wirings standard,ladder,parallel {DECODE}",
        None,
    ),
    "8b-tp2-fp8": (
        "engine",
        f"decode --model llama-3.1-8b --tp 2 --batch 1,16 --weights fp8 --wirings standard,ladder {DECODE}",
        None,
    ),
    "8b-tp4": ("engine", f"decode --model llama-3.1-8b --tp 4 --wirings {EVERY} --reducers symm {DECODE}", None),
    "8b-tp4-all-sms": (
        "engine",
        f"decode --model llama-3.1-8b --tp 4 --wirings standard,ladder,delayed-1 --reducers symm {DECODE}",
        100,
    ),
    "8b-tp2-all-sms": ("engine", f"decode --model llama-3.1-8b --tp 2 --wirings standard,ladder,delayed-1 {DECODE}", 100),
    "70b-tp8": (
        "engine",
        f"decode --model llama-3-70b --layers 16 --tp 8 --wirings standard,ladder,parallel {DECODE}",
        None,
    ),
    "8b-tp2-prefill": ("engine", "prefill --model llama-3.1-8b --tp 2 --wirings standard,ladder,parallel --repeats 7", None),
    "8b-tp1-e2e": (  # beside lab.serving.gpu --parts tp1
        "engine",
        "e2e --model llama-3.1-8b --tp 1 --batch 1,16,64 --prompt 256 --new 48 --links none --wirings standard,ladder --repeats 3",
        None,
    ),
    "8b-tp2-e2e": (
        "engine",
        "e2e --model llama-3.1-8b --tp 2 --prompt 512 --new 128 --wirings standard,ladder --repeats 3",
        None,
    ),
    "train-tp2": (
        "train",
        "train --model ladder-1b --layers 12 --tp 2 --batch 4 --sequence 1024 --dtype bfloat16 --wirings standard,ladder "
        "--repeats 8",
        None,
    ),
    "train-tp2-1b-fp32": ("train", f"train --model ladder-1b --layers 6 {TRAIN} --dtype float32", None),
    "train-tp2-70b-bf16": ("train", f"train --model llama-3-70b --layers 2 {TRAIN} --dtype bfloat16", None),
}
EMULATED = {"8b-tp2": "--tp 2", "8b-tp4": "--tp 4"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results"))
    parser.add_argument("--parts", default=",".join(PARTS), help="'emulated' adds the twins of those that ran before it.")
    parser.add_argument("--timeout", type=float, default=200.0, help="Seconds of a part.")
    options = parser.parse_args()
    for part in options.parts.split(","):
        if part == "emulated":
            for name, tp in EMULATED.items():
                _twin(options.out, name, tp, options.timeout)
            continue
        folder, arguments, percent = PARTS[part]
        shared = "" if "--tp 1 " in arguments else " --share-gpu"
        _run(f"{arguments}{shared}", options.out / folder / f"real-{part}.json", percent, options.timeout)


def _twin(out: Path, name: str, tp: str, timeout: float) -> None:
    """One rank without its peers, whose all-reduces last as long as those of the real ranks."""
    real = out / "engine" / f"real-{name}.json"
    if not real.exists():
        return
    result = json.loads(real.read_text())
    links = dict.fromkeys(f"{row['all_reduce_us']:.1f}us,no-pdl" for row in result["rows"] if row["batch"] == 1)
    command = f"decode --model {result['model']} {tp} --ranks emulated --wirings standard,ladder,parallel {DECODE} --links"
    _run(f"{command} {';'.join(links)}", out / "engine" / f"emulated-{name}.json", result["sm_percentage"], timeout)


def _run(arguments: str, target: Path, percent: int | None, timeout: float) -> None:
    command = [sys.executable, "-m", "ladder_residual", "bench", *arguments.split()]
    print("ladder bench", arguments, flush=True)
    environment = dict(os.environ) | ({SM_PERCENTAGE: str(percent)} if percent else {})
    began = time.monotonic()
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        print(f"  not done within {timeout:.0f} s", flush=True)
        return
    if done.returncode:
        print(f"  failed: {done.stderr[-1500:]}", flush=True)
        return
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    result["command"] = f"ladder bench {arguments}"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(result, indent=1) + "\n")
    for row in result["rows"]:
        shown = ("batch", "reducer", "link", "all_reduce_us", "wiring", "schedule", "ms", "ms_per_token", "over_standard")
        more = ("over_no_comm", "roofline_share", "tokens_per_s", "median_ms", "forward_ms", "backward_ms", "speedup")
        print(" ", {name: row[name] for name in (*shown, *more) if name in row}, flush=True)
    print(f"  {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
