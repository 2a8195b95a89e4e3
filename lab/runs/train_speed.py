"""Speed of whole training steps on one GPU: standard against ladder, interleaved on the same weights and the same compiled code.

    python -m lab.runs.train_speed --out results/train/speed.json

A step is forward, backward, clipping and AdamW on random tokens, as `ladder train` does it. MFU counts needed FLOPs only
(``train/speed.py``). Written after every case, so that a run that is cut short keeps what it has.
"""

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from ladder_residual.common.environment import environment
from ladder_residual.core.config import Wiring
from ladder_residual.models.hf import place_layers
from ladder_residual.models.hf_config import wiring_of
from ladder_residual.train.layout import training_layout
from ladder_residual.train.model import build
from ladder_residual.train.optimizer import ShardedAdamW
from ladder_residual.train.recipe import Recipe
from ladder_residual.train.speed import flops_per_token, peak_tflops

SHAPES = {
    "124m": dict(hidden_size=768, intermediate_size=2048, num_layers=12, num_heads=12, vocab_size=50304, tied_embeddings=True),
    "350m": dict(hidden_size=1024, intermediate_size=2816, num_layers=24, num_heads=16, vocab_size=50304, tied_embeddings=True),
    "350m-wide": dict(
        hidden_size=1024, intermediate_size=2816, num_layers=24, num_heads=8, vocab_size=50304, tied_embeddings=True
    ),
    "tiny": dict(hidden_size=64, intermediate_size=96, num_layers=2, num_heads=4, vocab_size=512, tied_embeddings=True),
}


def sync(device):
    if device.type == "cuda":
        torch.cuda.synchronize()


class Case:
    def __init__(self, layout, shape, sequence, rows, micro_rows, chunk, compile):
        recipe = dict(
            model=SHAPES[shape],
            data=dict(train="random", sequence=sequence),
            batch=dict(rows=rows, micro_rows=micro_rows),
            run=dict(precision="bf16", compile=compile, loss_chunk=chunk),
        )
        self.recipe = Recipe.from_dict(recipe)
        self.layout = layout
        self.trained: Any = build(self.recipe, layout)
        self.optimizer = ShardedAdamW(self.trained, self.recipe.optimizer, layout)
        vocabulary = self.recipe.model.shape().vocab_size
        self.tokens = torch.randint(0, vocabulary, (rows, sequence), device=layout.device)

    def rewire(self, spec):
        model = self.trained.model
        model.config.wiring = Wiring.parse(spec, model.config.num_hidden_layers).spec
        place_layers(model)
        assert wiring_of(model.config).spec == spec

    def step(self):
        micro = self.tokens.split(self.recipe.batch.micro_rows)
        for index, rows in enumerate(micro):
            self.trained.set_requires_gradient_sync(index == len(micro) - 1)
            batch = {"input_ids": rows, "labels": rows}
            self.trained(batch, float(self.tokens.numel())).total.backward()
        self.optimizer.step(1e-4)

    def measure(self, steps, rounds):
        times: dict[str, list[float]] = {"standard": [], "ladder": []}
        started = time.perf_counter()
        for spec in times:
            self.rewire(spec)
            for _ in range(3):
                self.step()
        sync(self.layout.device)
        warm_up = time.perf_counter() - started
        for number in range(rounds):
            for spec in list(times) if number % 2 == 0 else reversed(list(times)):
                self.rewire(spec)
                self.step()
                sync(self.layout.device)
                started = time.perf_counter()
                for _ in range(steps):
                    self.step()
                sync(self.layout.device)
                times[spec].append((time.perf_counter() - started) / steps)
        return times, warm_up


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cases", default="350m:2048:8:8,124m:1024:32:32", help="SHAPE:SEQUENCE:ROWS:MICRO_ROWS,...")
    parser.add_argument("--chunks", default="4096", help="tokens of logits at a time")
    parser.add_argument("--sdpa", default="default", help="default, flash or cudnn; several with commas")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--seconds", type=float, default=80, help="begin no case after this")
    options = parser.parse_args()
    began = time.perf_counter()
    rows = []
    with training_layout("auto", 300, 1, None) as layout:
        name = torch.cuda.get_device_name() if layout.device.type == "cuda" else "cpu"
        peak = peak_tflops(name)
        for case_name in options.cases.split(","):
            shape, *numbers = case_name.split(":")
            sequence, count, micro = map(int, numbers)
            for sdpa in options.sdpa.split(","):
                if sdpa != "default":
                    torch.backends.cuda.enable_flash_sdp(sdpa == "flash")
                    torch.backends.cuda.enable_mem_efficient_sdp(False)
                    torch.backends.cuda.enable_cudnn_sdp(sdpa == "cudnn")
                for chunk in map(int, options.chunks.split(",")):
                    if time.perf_counter() - began > options.seconds:
                        continue
                    if layout.device.type == "cuda":
                        torch.cuda.reset_peak_memory_stats()
                    case = Case(layout, shape, sequence, count, micro, chunk, not options.eager)
                    times, warm_up = case.measure(options.steps, options.rounds)
                    model, tokens = case.recipe.model.shape(), count * sequence
                    row = dict(shape=shape, parameters=model.parameters, sequence=sequence, rows=count, micro_rows=micro)
                    row |= dict(loss_chunk=chunk, sdpa=sdpa, compiled=not options.eager, warm_up_s=round(warm_up, 1))
                    if layout.device.type == "cuda":
                        row["memory_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 1)
                    for spec, seconds in times.items():
                        step = statistics.median(seconds)
                        row[spec] = dict(
                            step_ms=1e3 * step, tokens_per_s=tokens / step, all_ms=[round(1e3 * s, 2) for s in seconds]
                        )
                        if peak:
                            row[spec]["mfu"] = flops_per_token(model, sequence) * tokens / step / (peak * 1e12)
                    row["ladder_over_standard"] = row["ladder"]["tokens_per_s"] / row["standard"]["tokens_per_s"]
                    rows.append(row)
                    print(json.dumps(row), flush=True)
                    result = dict(benchmark="train-speed", device=name, peak_tflops=peak, rows=rows, **environment())
                    options.out.write_text(json.dumps(result, indent=1))
                    del case
                    torch._dynamo.reset()


if __name__ == "__main__":
    main()
