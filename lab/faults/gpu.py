"""What fault campaigns on a GPU need: a checkpoint that the CUDA engine runs, and an MPS server of their own."""

from __future__ import annotations

import atexit
import os
import subprocess
from pathlib import Path
from typing import Any


def own_mps(directory: Path) -> None:
    """For this process and the runs it starts. A client that is killed in a kernel takes the others of its server with it."""
    for variable, name in (("CUDA_MPS_PIPE_DIRECTORY", "mps"), ("CUDA_MPS_LOG_DIRECTORY", "mps-log")):
        folder = directory / name
        folder.mkdir(parents=True)
        os.environ[variable] = str(folder)
    subprocess.run(["nvidia-cuda-mps-control", "-d"], check=True)
    atexit.register(subprocess.run, ["nvidia-cuda-mps-control"], input="quit\n", text=True, capture_output=True)


def engine_checkpoint(directory: Path) -> Path:
    """Heads of 64 and several layers, with the demo model's tokenizer."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    from ladder_residual.bench.demo import demo_directory
    from ladder_residual.models.convert import convert

    tokenizer = AutoTokenizer.from_pretrained(demo_directory())
    config = LlamaConfig(
        hidden_size=512, intermediate_size=1024, num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=4, head_dim=64,
        vocab_size=512, max_position_embeddings=2048, initializer_range=0.05, bos_token_id=1, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    plain = directory.with_name(f"{directory.name}-standard")
    model: Any = LlamaForCausalLM(config)
    model.to(torch.bfloat16).save_pretrained(plain)
    tokenizer.save_pretrained(plain)
    convert(plain, directory, "ladder")
    return directory
