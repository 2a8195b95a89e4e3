"""stories15M (6 layers) on a CPU: which layers to convert, all numbers and orders; and short recovery runs that differ in one thing.

    python -m lab.runs.adapt_stories15m DATA work results/adapt/selection.json
    python -m lab.runs.adapt_stories15m DATA work results/adapt/stories15m.json --recover

DATA holds models/stories15M.bf16planes.xz, tokenizers/llama2_tokenizer.bin, text/stories15M_samples.jsonl.xz and
text/tinyshakespeare.txt.xz. Recovery runs have one optimizer and one learning rate (LoRA: its own), so that methods can be compared;
those done before are kept in ``work``. ``--only`` names some of them, for several processes side by side.
"""

from __future__ import annotations

import argparse
import json
import lzma
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))
HELD_OUT = 400  # stories


def make_model(data: Path, target: Path) -> None:
    """bf16 in two planes of bytes (high, low) -> the float32 file llama2.c knows -> a Hugging Face directory."""
    from transformers import LlamaForCausalLM

    from lab.tools import make_demo_model

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
    with lzma.open(data / "text" / "tinyshakespeare.txt.xz", "rt", encoding="utf-8") as lines:
        (work / "shakespeare.txt").write_text(lines.read()[:400_000], encoding="utf-8")


TOKENS, STEP, SEQUENCE, RATE = 163_840, 4096, 256, 6e-4
HALF, ALL = "ladder:3-5", "ladder"
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "control sft": ("standard", dict(method="sft")),
    "sft 3": (HALF, dict(method="sft")),
    "distill 3": (HALF, dict()),
    "lora 3": (HALF, dict(method="lora", learning_rate=4e-3)),
    "progressive 3": (HALF, dict(stages=("ladder:5", "ladder:4-5"), stages_share=0.5)),
    "distill 6": (ALL, dict()),
    "sft 6": (ALL, dict(method="sft")),
    "lora 6": (ALL, dict(method="lora", learning_rate=4e-3)),
    "progressive 6": (ALL, dict(stages=("ladder:4-5", "ladder:2-5"), stages_share=0.5)),
    "distill 3, seed 1": (HALF, dict(seed=1)),
    "sft 3, seed 1": (HALF, dict(method="sft", seed=1)),
    "distill 3, seed 2": (HALF, dict(seed=2)),
    "sft 3, seed 2": (HALF, dict(method="sft", seed=2)),
}


def recover(work: Path, name: str) -> None:
    """One run of ``ladder adapt``; its curve in ``work``."""
    from ladder_residual.adapt.run import adapt
    from ladder_residual.adapt.settings import AdaptSettings, DataSource
    from ladder_residual.distributed.world import distributed
    from ladder_residual.models.convert import convert

    wiring, changes = RUNS[name]
    source, folder = work / "stories15m", work / name.replace(",", "").replace(" ", "-")
    if not folder.exists():
        convert(source, folder, wiring=wiring)
    texts = (str(work / "heldout.jsonl"), str(work / "shakespeare.txt"))
    asked: dict[str, Any] = dict(
            student=str(folder), teacher=str(source), out=f"{folder}-recovered", data=(DataSource(str(work / "train.jsonl")),),
            heldout=texts, tokens=TOKENS, batch_tokens=STEP, sequence=SEQUENCE, learning_rate=RATE, evaluate_every=20,
            evaluate_tokens=16_384, progress=False,
    )  # fmt: skip
    settings = AdaptSettings(**asked | changes)
    with distributed("cpu") as world:
        found = adapt(settings, world, lambda line: print(f"{name}: {line}", flush=True))
    kept = {"name": name, "wiring": wiring, "changes": changes, "tokens": TOKENS, "curve": found.curve}
    (work / f"{folder.name}.json").write_text(json.dumps(kept) + "\n", encoding="utf-8")


def recover_all(work: Path, out: Path, only: list[str]) -> None:
    from ladder_residual.common.environment import environment

    for name in only or RUNS:
        if name not in RUNS:
            raise SystemExit(f"no run is called {name!r}; there are {', '.join(RUNS)}")
        if not (work / (name.replace(",", "").replace(" ", "-") + ".json")).exists():
            recover(work, name)
    done = [work / (name.replace(",", "").replace(" ", "-") + ".json") for name in RUNS]
    runs = [json.loads(path.read_text(encoding="utf-8")) for path in done if path.exists()]
    about = {
        "benchmark": "adapt stories15m",
        "model": "stories15M",
        "step_tokens": STEP,
        "learning_rate": RATE,
        "optimizer": "adamw",
    }
    out.write_text(json.dumps({**about, "runs": runs, **environment()}, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("work", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--tokens", type=int, default=4096, help="of the calibration text")
    parser.add_argument("--recover", action="store_true", help="recovery runs instead of the selection")
    parser.add_argument("--only", action="append", default=[], help="a recovery run; may be repeated")
    arguments = parser.parse_args()
    work = arguments.work
    work.mkdir(parents=True, exist_ok=True)
    model = work / "stories15m"
    if not model.exists():
        make_model(arguments.data, model)
        make_texts(arguments.data, work)
    if arguments.recover:
        recover_all(work, arguments.out, arguments.only)
        return
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
