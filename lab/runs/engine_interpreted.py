"""A real checkpoint through the engine's kernels on Triton's interpreter, in float32, on a CPU: are the greedy tokens transformers'?

python -m lab.runs.engine_interpreted CHECKPOINT --out results/engine

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

from lab.runs.engine_real_checkpoint import PROMPTS
from lab.triton_interpreter import mend_interpreter
from ladder_residual.common.environment import environment
from ladder_residual.distributed.world import World
from ladder_residual.engine.cache import KVCache
from ladder_residual.engine.cuda.pdl import PdlMode
from ladder_residual.engine.cuda.streams import RecordingStreams
from ladder_residual.engine.executor import Executor, Ops
from ladder_residual.engine.ops.gemv import GemvOps
from ladder_residual.engine.ops.prefill import FusedPrefillOps
from ladder_residual.engine.ops.tiles import GemvTiles, Tile
from ladder_residual.engine.reducers import NoReducer
from ladder_residual.engine.schedule import SCHEDULES, plan_steps
from ladder_residual.engine.spec import EngineSpec, RankSizes
from ladder_residual.engine.weights import stack_weights
from ladder_residual.models.hf_config import wiring_of
from ladder_residual.models.loading import load_model

CPU = torch.device("cpu")


def tiles(hidden: int, schedule: str, *, packed: bool) -> GemvTiles:
    """Large: each program costs the interpreter milliseconds. Gate/up and the head are persistent, the others loop over two blocks of K."""
    width = 1 << (hidden - 1).bit_length()
    rows, persistent = Tile(128, width // 2, 1, 1), Tile(128, width, 1, programs_per_sm=1)
    if schedule == "interleaved":
        persistent = replace(persistent, prefetch_second=True, tail_share=0.5)
    made = GemvTiles(
        rows, rows, persistent, rows, Tile(512, width, 1, programs_per_sm=1), split_k=1, kv_splits=2, block_kv=16
    )  # fmt: skip
    return made.with_packed_weights() if packed else made


@torch.inference_mode()
def greedy(model: Any, prompt: torch.Tensor, new: int, schedule: str, *, packed: bool) -> list[int]:
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
    executor(reading, prompt.shape[1], "serial").run(prompt, logits)
    decode = executor(
        GemvOps(spec, sizes, weights, cache, tiles(sizes.hidden, schedule, packed=packed), pdl=PdlMode.OFF), 1, schedule
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
        model: Any = load_model(options.checkpoint, World(), wiring=wiring, dtype="float32")
        equal, count = [], 0
        for number, text in enumerate(PROMPTS[: options.prompts]):
            prompt = tokenizer(text, return_tensors="pt")
            wanted = model.generate(
                **prompt, max_new_tokens=options.new, min_new_tokens=options.new, do_sample=False, pad_token_id=0
            )[0, prompt["input_ids"].shape[1] :].tolist()  # fmt: skip
            schedule = SCHEDULES[number % len(SCHEDULES)] if wiring.startswith("ladder") else "serial"
            found = greedy(model, prompt["input_ids"], options.new, schedule, packed=number % 2 == 1)
            equal.append(sum(a == b for a, b in zip(found, wanted, strict=True)))
            count += options.new
            print(wiring, schedule, equal[-1], "of", options.new, repr(tokenizer.decode(found)), flush=True)
        rows.append({"wiring": f"{wiring}, float32", "tokens": count, "equal_tokens": sum(equal)})
    name = Path(options.checkpoint).name
    result = {"benchmark": "generate", "emulated": False, "interpreted": True, "model": name, "tp": 1, "batch": 1, "rows": rows}
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / f"generate-{name}-interpreted.json").write_text(json.dumps({**result, **environment()}, indent=1) + "\n")


if __name__ == "__main__":
    main()
