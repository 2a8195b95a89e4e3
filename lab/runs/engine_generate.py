"""`generate` on one GPU with the CUDA engine and with transformers' own forward: the same tokens?

python -m lab.runs.engine_generate --out results/engine

Random weights (a Llama of 8 layers, bfloat16) make near-ties common, so the share of equal tokens is reported together with how
close the two best logits were where the first difference arose.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import ladder_residual  # noqa: F401
from ladder_residual.common.environment import environment
from ladder_residual.distributed.world import World
from ladder_residual.generation.engine_adapter import engine_model
from ladder_residual.models.loading import load_model

NEW = 64


def checkpoint(directory: Path) -> None:
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(0)
    sizes: dict[str, Any] = dict(vocab_size=32000, hidden_size=1024, intermediate_size=2816, num_hidden_layers=8)
    config = LlamaConfig(**sizes, num_attention_heads=16, num_key_value_heads=4, head_dim=64, dtype="bfloat16")
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        model.lm_head.weight.mul_(20)  # peaked logits, so that rounding decides few tokens
    model.save_pretrained(directory)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results/engine"))
    options = parser.parse_args()
    world = World(device=torch.device("cuda"))
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        checkpoint(Path(scratch))
        ids = torch.randint(3, 32000, (3, 40), device="cuda", generator=torch.Generator("cuda").manual_seed(1))
        mask = torch.ones_like(ids)
        mask[1, :15] = 0
        mask[2, :31] = 0
        inputs = {"input_ids": ids.masked_fill(mask == 0, 0), "attention_mask": mask, "pad_token_id": 0}
        for wiring in ("standard", "ladder", "ladder:last-half"):
            outputs, seconds = {}, {}
            for kind in ("torch", "cuda"):
                model: Any = load_model(scratch, world, wiring=wiring)
                if kind == "cuda":
                    model = engine_model(model, world, batch=3, max_context=40 + NEW)
                for _ in range(2):  # the first run warms up
                    if kind == "cuda":
                        model.start()
                    torch.cuda.synchronize()
                    began = time.perf_counter()
                    settings = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False}
                    outputs[kind] = model.generate(**inputs, **settings)
                    torch.cuda.synchronize()
                    seconds[kind] = time.perf_counter() - began
            equal = outputs["torch"][:, 40:] == outputs["cuda"][:, 40:]
            before = [int(row.int().cumprod(0).sum()) for row in equal]  # tokens before the first difference
            rows.append(
                {
                    "wiring": wiring,
                    "tokens": equal.numel(),
                    "equal_tokens": int(equal.sum()),
                    "equal_before_first_difference": before,
                    "torch_ms_per_step": round(1e3 * seconds["torch"] / NEW, 3),
                    "engine_ms_per_step": round(1e3 * seconds["cuda"] / NEW, 3),
                }
            )
            print(json.dumps(rows[-1]), flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    result = {"benchmark": "generate", "model": "random llama, 8 layers, d 1024", "tp": 1, "batch": 3, "rows": rows}
    (options.out / "generate.json").write_text(json.dumps({**result, "emulated": False, **environment()}, indent=1) + "\n")


if __name__ == "__main__":
    main()
