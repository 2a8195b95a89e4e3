"""What is not measured yet of real ranks and of vLLM on one GPU, in the order of its worth; each part is bounded and writes its JSON.

    python -m lab.runs.on_one_gpu vllm --dry-run                  # what would run, and how long
    python -m lab.runs.on_one_gpu vllm --out DIR                  # DIR gets flat JSON files and one log

Each of vllm, ranks, kills, quantised and fp8-cache ends within ten minutes. A part that fails, or does not end, leaves the rest its time.
``vllm`` needs what ``lab.serving.gpu_unpack`` unpacks on PYTHONPATH; the others need torch alone.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import NamedTuple, TextIO

from lab.serving.gpu import MPS, multi_process_service

SECONDS = 570.0  # of all parts
GRACE = 10.0  # seconds of a part that is asked to end


class Part(NamedTuple):
    name: str
    seconds: float  # at most
    arguments: str  # of python; OUT stands for the directory of results
    mps: bool = False  # needs an MPS server; the others start their own, or none


LONG_CONTEXT = (
    "-m ladder_residual bench decode --model llama-3.1-8b --tp 1 --batch 1,16 --context 16384 --wirings standard --links none"
)

PARTS = {
    "vllm": [
        Part("times", 300, "-m lab.serving.gpu --parts ipc+nccl --rounds 3 --budget 280 --out OUT/gpu-times.json"),
        Part(
            "tokens",
            125,
            "-m lab.serving.gpu --parts parity+wirings --engines own-ipc,piecewise,delayed --budget 110 --out OUT/gpu-tokens.json",
        ),
        Part("70b-tp8", 145, "-m lab.serving.gpu --parts emulated --rounds 2 --budget 130 --out OUT/gpu-emulated.json"),
    ],
    "ranks": [
        Part("logits-tp4", 170, "tests/gpu/test_ranks_gpu.py 4 --seconds 140 --out OUT", mps=True),
        Part("logits-tp8", 200, "tests/gpu/test_ranks_gpu.py 8 --seconds 160 --out OUT", mps=True),
        Part("losses", 120, "tests/gpu/test_train_ranks_gpu.py --out OUT/train-losses.json", mps=True),
        Part("70b-tp8", 120, "-m lab.runs.engine_real_ranks --parts 70b-tp8 --out OUT --timeout 115", mps=True),
    ],
    "kills": [
        Part("engine-tp1", 90, "-m lab.runs.engine_real_ranks --parts 8b-tp1-e2e --out OUT --timeout 85"),
        Part(
            "generate",
            250,
            "-m lab.faults --what generate-gpu --rounds 20 --named none --seconds 220 --out OUT/generate-gpu.json",
        ),
        Part("train", 230, "-m lab.faults --what train-gpu --rounds 20 --named none --seconds 190 --out OUT/train-gpu.json"),
    ],
    "fp8-cache": [
        Part("logits", 240, "tests/gpu/test_fp8_cache_gpu.py"),
        Part("times-fp8", 120, f"{LONG_CONTEXT} --kv-cache-dtype fp8"),  # the result is the log's last line
        Part("times-bf16", 120, LONG_CONTEXT),
    ],
    "quantised": [
        Part("logits", 150, "tests/gpu/test_quantized_gpu.py"),
        Part("times", 300, "-m lab.runs.engine_quantized --out OUT"),
        Part("tp2-fp8", 110, "-m lab.runs.engine_real_ranks --parts 8b-tp2-fp8 --out OUT --timeout 105", mps=True),
    ],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("call", choices=PARTS)
    parser.add_argument("--out", type=Path, default=Path("on-one-gpu"))
    parser.add_argument("--parts", help="Only these, with commas.")
    parser.add_argument("--dry-run", action="store_true")
    options = parser.parse_args()
    parts = [part for part in PARTS[options.call] if options.parts is None or part.name in options.parts.split(",")]
    if options.dry_run:
        for part in parts:
            print(f"{part.name}: at most {part.seconds:.0f} s{', with MPS' if part.mps else ''}: python {part.arguments}")
        return
    options.out.mkdir(parents=True, exist_ok=True)
    ends = time.monotonic() + SECONDS
    with (options.out / f"{options.call}.log").open("a") as log:
        for part in parts:
            with multi_process_service() if part.mps else nullcontext():
                print(run(part, options.out, log, ends), flush=True)


def run(part: Part, out: Path, log: TextIO, ends: float) -> str:
    """How it ended, in one line. What it started ends with it."""
    began = time.monotonic()
    left = ends - began
    if left < 30:
        return f"{part.name}: not begun, {max(left, 0):.0f} s were left"
    words = [word.replace("OUT", str(out)) for word in part.arguments.split()]
    environment = os.environ | {"PYTHONPATH": f"src:.:{os.environ.get('PYTHONPATH', '')}"} | (MPS if part.mps else {})
    log.write(f"\n### python {' '.join(words)}\n")
    log.flush()
    process = subprocess.Popen([sys.executable, *words], env=environment, stdout=log, stderr=log, start_new_session=True)
    try:
        ended = f"exit code {process.wait(min(part.seconds, left))}"
    except subprocess.TimeoutExpired:
        ended = "not done"
        process.send_signal(signal.SIGINT)  # it ends the process groups that it has started
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return f"{part.name}: {ended} after {time.monotonic() - began:.0f} s"


if __name__ == "__main__":
    main()
