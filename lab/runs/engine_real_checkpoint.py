"""A real checkpoint on one GPU: the CUDA engine's greedy tokens against transformers' own forward, every wiring.

python -m lab.runs.engine_real_checkpoint CHECKPOINT --out results/engine
python -m lab.runs.engine_real_checkpoint CHECKPOINT --out results/engine --at-once 1 --dtypes float32
python -m lab.runs.engine_real_checkpoint CHECKPOINT --out results/engine --tp 3 --dtypes float32
python -m lab.runs.engine_real_checkpoint CHECKPOINT --out results/engine --control

The first reads all prompts together (GEMMs by cuBLAS), the second one after another (the kernels for one sequence), the third runs the
engine on real ranks, which share one GPU, against transformers on one. Nothing is timed.
Where the two best tokens are closer than the dtype resolves either may be chosen, and from there the texts differ. The judge is the
same model in float32: it reads each text and says, for every token, how far below its own best choice the chosen token lies (0
where they agree). ``--control`` runs no engine and needs no GPU: transformers' eager attention against its sdpa, the same model and
dtype twice, to see how many tokens near ties alone make different.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch

import ladder_residual  # noqa: F401
from ladder_residual.common.environment import environment
from ladder_residual.distributed import shared_gpu
from ladder_residual.distributed.launch import launch, missing_ranks, run_command
from ladder_residual.distributed.world import World, distributed
from ladder_residual.generation.engine_adapter import engine_model
from ladder_residual.models.loading import load_model

NEW = 64
PROMPTS = [
    "The capital of France is",
    "Photosynthesis is the process by which plants",
    "def fibonacci(n):\n    ",
    "Once upon a time, in a small village by the sea, there lived",
    "The three laws of motion were formulated by",
    "To make a good cup of tea, first",
]


def regret(judge: Any, sequences: torch.Tensor, mask: torch.Tensor, prompt: int) -> torch.Tensor:
    """Logits between the judge's best token and the chosen one, for every new token; none was allowed to end the text."""
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    logits = judge(input_ids=sequences, attention_mask=mask, position_ids=positions, use_cache=False).logits[:, prompt - 1 : -1]
    ends = judge.generation_config.eos_token_id
    if ends is not None:
        logits[..., ends] = -torch.inf
    chosen = logits.gather(-1, sequences[:, prompt:, None])[..., 0]
    return logits.max(-1).values - chosen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint")
    parser.add_argument("--out", type=Path, default=Path("results/engine"))
    parser.add_argument("--wirings", default="standard,ladder:last-half,ladder")
    parser.add_argument("--dtypes", default="bfloat16,float16,float32")
    parser.add_argument("--control", action="store_true", help="transformers' eager attention in the engine's place")
    parser.add_argument("--at-once", type=int, default=len(PROMPTS), help="Prompts in a batch.")
    parser.add_argument("--tp", type=int, default=1, help="Ranks of the engine, all on this machine's first GPU.")
    options = parser.parse_args()
    if options.at_once < 1 or len(PROMPTS) % options.at_once:
        parser.error(f"--at-once {options.at_once} does not divide the {len(PROMPTS)} prompts")
    if options.tp == 1:
        device = torch.device("cuda" if torch.cuda.is_available() or not options.control else "cpu")
        compare(options, World(device=device))
        return
    shared_gpu.share_gpu()
    if missing_ranks(options.tp):
        sys.exit(launch(sys.argv[1:], options.tp, "lab.runs.engine_real_checkpoint"))
    with distributed("cuda") as world:
        compare(options, world)


@torch.inference_mode()
def compare(options: argparse.Namespace, world: World) -> None:
    """The engine on all ranks of ``world``; transformers and the judge on each rank alone."""
    from transformers import AutoTokenizer

    at_once, device = options.at_once, world.device
    alone = World(device=device)
    ours = "eager" if options.control else "cuda"
    tokenizer = AutoTokenizer.from_pretrained(options.checkpoint)
    tokenizer.padding_side = "left"
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    inputs = tokenizer(PROMPTS, return_tensors="pt", padding=True).to(device)
    prompt = inputs["input_ids"].shape[1]
    full_mask = torch.cat([inputs["attention_mask"], inputs["attention_mask"].new_ones(len(PROMPTS), NEW)], -1)
    rows = []
    for wiring, dtype in ((w, d) for w in options.wirings.split(",") for d in options.dtypes.split(",")):
        tokens = {}
        for kind in ("torch", ours):
            attention = "eager" if kind == "eager" else "sdpa"
            ranks = world if kind == "cuda" else alone
            model: Any = load_model(options.checkpoint, ranks, wiring=wiring, dtype=dtype, attention=attention)
            if kind == "cuda":
                model = engine_model(model, world, batch=at_once, max_context=prompt + NEW, exact=True)
            texts = []
            for first in range(0, len(PROMPTS), at_once):
                if kind == "cuda":
                    model.start()
                batch = {name: inputs[name][first : first + at_once] for name in ("input_ids", "attention_mask")}
                asked = dict(max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False, pad_token_id=tokenizer.pad_token_id)
                texts.append(model.generate(**batch, **asked))
            tokens[kind] = torch.cat(texts)
            del model
            torch.cuda.empty_cache()
        judge = load_model(options.checkpoint, alone, wiring=wiring, dtype="float32")
        equal = tokens["torch"][:, prompt:] == tokens[ours][:, prompt:]
        row: dict[str, Any] = {
            "wiring": f"{wiring}, {dtype}",
            "tokens": equal.numel(),
            "equal_tokens": int(equal.sum()),
            "equal_before_first_difference": [int(one.int().cumprod(0).sum()) for one in equal],
        }
        for kind in ("torch", ours):
            gap = regret(judge, tokens[kind], full_mask, prompt)
            row[f"{kind}_float32_agrees"] = round(float((gap == 0).float().mean()), 4)
            row[f"{kind}_largest_regret"] = round(float(gap.max()), 4)
        row["text"] = tokenizer.decode(tokens[ours][0, prompt:])[:200]
        rows.append(row)
        if world.is_main:
            print(json.dumps(row), flush=True)
        del judge
        torch.cuda.empty_cache()
    name = Path(options.checkpoint).name
    result: dict[str, Any] = {
        "benchmark": "generate",
        "emulated": False,
        "model": name,
        "tp": world.size,
        "batch": at_once,
        "rows": rows,
    }
    if world.size > 1:
        result |= {"ranks": "real", **shared_gpu.sharing(world.ranks_per_gpu)}
    if options.control:
        result["control"] = True  # transformers' eager attention against its SDPA: no engine
    if not world.is_main:
        return
    options.out.mkdir(parents=True, exist_ok=True)
    suffix = ("" if at_once == len(PROMPTS) else f"-batch{at_once}") + ("-control" if options.control else "")
    suffix += f"-tp{world.size}" if world.size > 1 else ""
    (options.out / f"generate-{name}{suffix}.json").write_text(json.dumps({**result, **environment()}, indent=1) + "\n")


if __name__ == "__main__":
    run_command(main)
