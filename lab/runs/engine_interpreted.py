"""A real checkpoint through the engine's kernels on Triton's interpreter, in float32, on a CPU: are the greedy tokens transformers'?

PYTHONPATH=src python runs/engine_interpreted.py CHECKPOINT --out results/engine

float32 leaves no near ties for rounding to decide, so the tokens must be equal. Nothing here is a measure of speed: the interpreter
runs one program after another, with tiles that suit it.
"""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are defined

import torch
from engine_real_checkpoint import PROMPTS

from ladder_residual.bench.environment import environment
from ladder_residual.engine._triton import mend_interpreter
from ladder_residual.engine.cache import KVCache
from ladder_residual.engine.execute import Executor, Ops
from ladder_residual.engine.gemv_ops import GemvOps, GemvTiles, Tile
from ladder_residual.engine.prefill_ops import FusedPrefillOps
from ladder_residual.engine.reducers import NoReducer
from ladder_residual.engine.schedule import SCHEDULES, plan_steps
from ladder_residual.engine.spec import EngineSpec, RankSizes
from ladder_residual.engine.streams import RecordingStreams
from ladder_residual.engine.weights import stack_weights
from ladder_residual.hf_config import wiring_of
from ladder_residual.loading import load_model
from ladder_residual.parallel import World

CPU = torch.device("cpu")


def tiles(hidden: int, schedule: str, *, in_pairs: bool) -> GemvTiles:
    """Large: each program costs the interpreter milliseconds. Gate/up and the head walk, the others take their rows in two pieces."""
    width = 1 << (hidden - 1).bit_length()
    rows, walk = Tile(128, width // 2, 1, 1), Tile(128, width, 1, walkers=1)
    if schedule == "woven":
        walk = replace(walk, second=True, lead=0.5)
    made = GemvTiles(rows, rows, walk, rows, Tile(512, width, 1, walkers=1), slices=1, splits=2, block_t=16)
    return made.in_pairs() if in_pairs else made


@torch.inference_mode()
def greedy(model: Any, prompt: torch.Tensor, new: int, schedule: str, *, in_pairs: bool) -> list[int]:
    wiring, spec = wiring_of(model.config), EngineSpec.from_hf(model.config.to_dict(), max_context=prompt.shape[1] + new)
    sizes = RankSizes.of(spec.shape, 1, 0)
    weights = stack_weights(spec, sizes, {name: parameter.data for name, parameter in model.named_parameters()})
    cache = KVCache(spec, sizes, 1, prompt.shape[1] + new, torch.float32, "cpu")

    def executor(ops: Ops, rows: int, schedule: str) -> Executor:
        plan = plan_steps(wiring, schedule)
        return Executor(
            plan, ops, NoReducer(), RecordingStreams(), rows=rows, hidden=sizes.hidden, tp=1, dtype=torch.float32, device=CPU
        )  # fmt: skip

    reading = FusedPrefillOps(spec, sizes, weights, cache, prompt.shape[1])
    reading.last = torch.tensor([prompt.shape[1] - 1])
    logits = torch.full((1, sizes.vocab_rows), float("nan"))
    executor(reading, prompt.shape[1], "one").run(prompt, logits)
    decode = executor(
        GemvOps(spec, sizes, weights, cache, tiles(sizes.hidden, schedule, in_pairs=in_pairs), pdl=0), 1, schedule
    )
    end = model.generation_config.eos_token_id
    tokens = []
    for position in range(prompt.shape[1], prompt.shape[1] + new):
        logits[:, end] = -torch.inf
        tokens.append(int(logits.argmax()))
        cache.positions.fill_(position)
        if len(tokens) < new:
            decode.run(torch.tensor(tokens[-1:]), logits.fill_(float("nan")))
    return tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint")
    parser.add_argument("--out", type=Path, default=Path("results/engine"))
    parser.add_argument("--wirings", default="standard,ladder:last-half,ladder")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--new", type=int, default=8, help="tokens of each; one takes the interpreter some 20 s")
    options = parser.parse_args()
    from transformers import AutoTokenizer

    mend_interpreter()
    tokenizer = AutoTokenizer.from_pretrained(options.checkpoint)
    rows = []
    for wiring in options.wirings.split(","):
        model = load_model(options.checkpoint, World(), wiring=wiring, dtype="float32")
        equal, count = [], 0
        for number, text in enumerate(PROMPTS[: options.prompts]):
            prompt = tokenizer(text, return_tensors="pt")
            wanted = model.generate(
                **prompt, max_new_tokens=options.new, min_new_tokens=options.new, do_sample=False, pad_token_id=0
            )[0, prompt["input_ids"].shape[1] :].tolist()  # fmt: skip
            schedule = SCHEDULES[number % len(SCHEDULES)] if wiring.startswith("ladder") else "one"
            found = greedy(model, prompt["input_ids"], options.new, schedule, in_pairs=number % 2 == 1)
            equal.append(sum(a == b for a, b in zip(found, wanted, strict=True)))
            count += options.new
            print(wiring, schedule, equal[-1], "of", options.new, repr(tokenizer.decode(found)), flush=True)
        rows.append({"wiring": f"{wiring}, float32", "tokens": count, "equal_tokens": sum(equal)})
    name = Path(options.checkpoint).name
    result = {"benchmark": "generate", "emulated": False, "interpreted": True, "model": name, "tp": 1, "batch": 1, "rows": rows}
    result["notes"] = [
        "The same kernels on Triton's interpreter, on a CPU, one prompt at a time, every second one with weights in pairs "
        f"(ladder's schedules by turns: {', '.join(SCHEDULES[: options.prompts])}), against transformers'",
        "own forward in float32, where no near tie is left for rounding to decide.",
    ]
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / f"generate-{name}-interpreted.json").write_text(json.dumps({**result, **environment()}, indent=1) + "\n")


if __name__ == "__main__":
    main()
