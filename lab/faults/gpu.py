"""What fault campaigns on a GPU need: a checkpoint that the CUDA engine runs, an MPS server of their own, and whether the card is free."""

from __future__ import annotations

import atexit
import os
import subprocess
import time
from pathlib import Path
from typing import Any

from lab.faults.outcome import Outcome

SLACK_MIB = 100  # a rank's context alone takes several times as much


def own_mps(directory: Path) -> None:
    """For this process and the runs it starts. A client that is killed in a kernel takes the others of its server with it."""
    for variable, name in (("CUDA_MPS_PIPE_DIRECTORY", "mps"), ("CUDA_MPS_LOG_DIRECTORY", "mps-log")):
        folder = directory / name
        folder.mkdir(parents=True)
        os.environ[variable] = str(folder)
    subprocess.run(["nvidia-cuda-mps-control", "-d"], check=True)
    atexit.register(subprocess.run, ["nvidia-cuda-mps-control"], input="quit\n", text=True, capture_output=True)


def used_mib() -> int:
    """Of the memory of all GPUs."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return sum(map(int, subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()))


def with_free_gpu(outcome: Outcome | None, idle_mib: int, within: float = 10.0) -> Outcome | None:
    """What a run that has ended held of the card is free again: no more is used than between two runs."""
    if outcome is None:
        return None
    deadline = time.monotonic() + within
    while (used := used_mib()) > idle_mib + SLACK_MIB:
        if time.monotonic() > deadline:
            outcome.wrong.append(f"left behind: {used} MiB of the GPU are in use, {idle_mib} MiB between two runs")
            break
        time.sleep(0.2)
    return outcome


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
