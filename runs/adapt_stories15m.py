"""The selection of docs/adaptation.md: which layers of stories15M (6 layers) to convert, all numbers and orders, on a CPU.

    python runs/adapt_stories15m.py DATA work results/adapt/selection.json

DATA holds models/stories15M.bf16planes.xz, tokenizers/llama2_tokenizer.bin and text/stories15M_samples.jsonl.xz.
"""

from __future__ import annotations

import argparse
import json
import lzma
import subprocess
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))
HELD_OUT = 400  # stories


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("work", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--tokens", type=int, default=4096)
    arguments = parser.parse_args()
    work = arguments.work
    work.mkdir(parents=True, exist_ok=True)
    model = work / "stories15m"
    if not model.exists():
        make_model(arguments.data, model)
        make_texts(arguments.data, work)
    layers = json.loads((model / "config.json").read_text(encoding="utf-8"))["num_hidden_layers"]
    words = [
        "convert",
        str(model),
        str(work / "auto"),
        "--wiring",
        "auto",
        "--layers",
        str(layers),
        "--overwrite",
        "--device",
        "cpu",
    ]
    words += ["--calibration", str(work / "train.jsonl"), "--check", str(work / "heldout.jsonl")]
    subprocess.run([sys.executable, "-m", "ladder_residual", *words, "--calibration-tokens", str(arguments.tokens)], check=True)
    found = json.loads((work / "auto" / "selection.json").read_text(encoding="utf-8"))
    arguments.out.write_text(json.dumps({"model": "stories15M", **found}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
