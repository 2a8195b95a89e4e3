"""The second subject of docs/adaptation.md: stories15M (6 layers), healed on its own samples with the ``ladder`` command alone.

    python runs/adapt_stories15m.py DATA work results/adapt/stories15m.json --tokens 400000

DATA holds models/stories15M.bf16planes.xz, tokenizers/llama2_tokenizer.bin and text/stories15M_samples.jsonl.xz. Runs on a CPU.
"""

from __future__ import annotations

import argparse
import json
import lzma
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))
HELD_OUT = 400  # stories
RUNS = (
    ("distill, last 3", "ladder:last-half", ["--method", "distill"]),
    ("distill, all 6", "ladder", ["--method", "distill", "--hidden-weight", "1"]),
    ("sft, all 6", "ladder", ["--method", "sft"]),
    ("control (sft, unchanged)", "ladder", ["--method", "sft", "--control"]),
)


def make_model(data: Path, target: Path) -> None:
    """bf16 in two planes of bytes (high, low) -> the float32 file llama2.c knows -> a Hugging Face directory."""
    import make_demo_model
    from transformers import LlamaForCausalLM

    raw = lzma.decompress((data / "models" / "stories15M.bf16planes.xz").read_bytes())
    count = (len(raw) - 28) // 2
    high, low = (np.frombuffer(raw, np.uint8, count, 28 + plane * count).astype(np.uint32) for plane in (0, 1))
    plain = target.with_suffix(".bin")
    plain.write_bytes(raw[:28] + (high << 24 | low << 16).view(np.float32).tobytes())
    config, state = make_demo_model.weights(plain)
    model = LlamaForCausalLM(config)
    model.load_state_dict(state, strict=False)
    model.save_pretrained(target)
    make_demo_model.tokenizer(data / "tokenizers" / "llama2_tokenizer.bin").save_pretrained(target)


def make_texts(data: Path, work: Path) -> None:
    with lzma.open(data / "text" / "stories15M_samples.jsonl.xz", "rt", encoding="utf-8") as lines:
        stories = [json.loads(line)["text"] for line in lines]
    for name, part in (("heldout", stories[:HELD_OUT]), ("train", stories[HELD_OUT:])):
        (work / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in part), encoding="utf-8")


def ladder(*words: str) -> str:
    done = subprocess.run([sys.executable, "-m", "ladder_residual", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    return done.stdout + done.stderr


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("work", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--tokens", type=int, default=400_000)
    arguments = parser.parse_args()
    work = arguments.work
    work.mkdir(parents=True, exist_ok=True)
    model = work / "stories15m"
    if not model.exists():
        make_model(arguments.data, model)
        make_texts(arguments.data, work)
    runs, original = [], None
    for name, wiring, options in reversed(RUNS):  # the control first: it begins where the others want to end
        student = work / re.sub(r"\W+", "-", name)
        ladder("convert", str(model), str(student), "--wiring", wiring, "--overwrite")
        began = time.monotonic()
        said = ladder(
            *("adapt", str(student), "--teacher", str(model), "--data", str(work / "train.jsonl"), *options),
            *(
                "--heldout",
                str(work / "heldout.jsonl"),
                "--sequence",
                "256",
                "--batch-tokens",
                "4096",
                "--tokens",
                str(arguments.tokens),
            ),
            *("--lr", "1e-3", "--out", f"{student}-healed", "--no-resume"),
        )
        before, after = map(float, re.search(r"loss ([\d.]+) -> ([\d.]+)", said).groups())
        if "control" in name:
            original = before
        assert original is not None
        closed = 100 * (before - after) / (before - original) if before != original else None
        entry = {"name": name, "wiring": wiring if "control" not in name else "standard", "tokens": arguments.tokens}
        runs.append(
            entry
            | {"before": {"loss": before}, "after": {"loss": after}, "closed": closed, "seconds": time.monotonic() - began}
        )
        print(runs[-1], flush=True)
        arguments.out.write_text(json.dumps({"original": original, "runs": runs}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
