"""A model whose layers are split over ranks, in your own loop. Every rank runs this file.

torchrun --nproc-per-node 2 examples/tensor_parallel.py [SOURCE]
"""

import sys
import tempfile
from pathlib import Path

import torch

import ladder_residual as ladder

with tempfile.TemporaryDirectory() as folder:
    source = sys.argv[1] if len(sys.argv) > 1 else ladder.export_demo(Path(folder, "stories"))
    loaded = ladder.load(source, wiring="ladder")
    model, tokenizer = loaded
    inputs = tokenizer("Once upon a time", return_tensors="pt", return_token_type_ids=False).to(model.device)
    with torch.inference_mode():
        logits = model(**inputs).logits[0, -1]  # whole on every rank
    weights = sum(parameter.numel() for parameter in model.parameters())
    best = tokenizer.convert_ids_to_tokens(logits.topk(3).indices.tolist())
    print(f"rank {loaded.world.rank} of {loaded.world.size}: {weights:,} weights, next token {' '.join(best)}", flush=True)
