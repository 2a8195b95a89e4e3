"""fp8 of a plain checkpoint, in the layout of compressed-tensors: a scale per output row, activations quantised as they come, so that
no calibration is needed. vLLM and transformers load it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...common.suggest import did_you_mean
from ..checkpoint_reader import INDEX, Checkpoint
from ..checkpoint_writer import DirectoryWriter
from ..sharding import is_projection

if TYPE_CHECKING:
    from torch import Tensor

FORMATS = ("fp8",)
LARGEST = 448.0  # of E4M3
_DECODER_LAYER = re.compile(r"(?:^|\.)layers\.[0-9]+\.")
_NUMBERS = {"num_bits": 8, "type": "float", "symmetric": True}


def check_quantizable(checkpoint: Checkpoint, to: str) -> None:
    """ValueError unless there is something plain to quantise; before torch is imported."""
    if to not in FORMATS:
        raise ValueError(f"unknown format --quantize {to!r}{did_you_mean(to, FORMATS)}; choose {', '.join(FORMATS)}")
    if checkpoint.quantised:
        raise ValueError(
            f"{checkpoint.directory} is quantised already: leave out --quantize, or give the model it was quantised from"
        )
    stacked = next((name for name in checkpoint.names if ".experts." in name and len(checkpoint.shape(name)) == 3), None)
    if stacked is not None:
        raise ValueError(
            f"{checkpoint.directory} stores its experts stacked ({stacked}), and fp8 is written for experts one by one, as published "
            f"checkpoints have them: load it with transformers and save_pretrained it, which unstacks them"
        )


def is_quantized(name: str) -> bool:
    """The projections of decoder layers; not the embedding, the head, norms and routers."""
    return bool(_DECODER_LAYER.search(name)) and is_projection(name)


def config_of(checkpoint: Checkpoint) -> dict[str, Any]:
    """``quantization_config``. What is left plain is listed by module, routers by the end of their name: transformers renames some."""
    plain = {name.removesuffix(".weight") for name in checkpoint.names if _plain_matrix(checkpoint, name)}
    ends = sorted({module.rpartition(".")[2] for module in plain if _DECODER_LAYER.search(module)})
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {**_NUMBERS, "strategy": "channel", "dynamic": False},
                "input_activations": {**_NUMBERS, "strategy": "token", "dynamic": True},
                "output_activations": None,
            }
        },
        "ignore": ["lm_head", *(rf"re:.*\.{re.escape(end)}$" for end in ends)],
        "kv_cache_scheme": None,
    }


def _plain_matrix(checkpoint: Checkpoint, name: str) -> bool:
    return name.endswith(".weight") and len(checkpoint.shape(name)) == 2 and not is_quantized(name)


def fp8_per_channel(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Numbers in E4M3 and a scale for each row. The scale is rounded first, so that numbers are right for the one that is stored."""
    import torch

    values = weight.to(torch.float32)
    scale = values.abs().amax(1, keepdim=True) / LARGEST
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)  # a row of zeros
    # float16 cannot hold the scale of small weights
    scale = scale.to(torch.bfloat16 if weight.dtype == torch.bfloat16 else torch.float32)
    numbers = (values / scale.to(torch.float32)).clamp(-LARGEST, LARGEST)
    return numbers.to(torch.float8_e4m3fn), scale


def write_fp8(checkpoint: Checkpoint, directory: DirectoryWriter) -> tuple[int, int]:
    """The files of ``checkpoint``, its projections quantised, one file after the other: bytes of the weights before and after."""
    from safetensors.torch import save_file

    where: dict[str, str] = {}
    before = after = 0
    for file in sorted(set(checkpoint.files.values())):
        tensors: dict[str, Tensor] = {}
        for name in [name for name, its in checkpoint.files.items() if its == file]:
            tensor = checkpoint.read(name)
            before += tensor.nbytes
            made = {name: tensor}
            if is_quantized(name):
                numbers, scale = fp8_per_channel(tensor)
                made = {name: numbers, name + "_scale": scale}
            tensors |= {part: value.contiguous() for part, value in made.items()}
        save_file(tensors, Path(directory.path, file), metadata={"format": "pt"})
        after += sum(tensor.nbytes for tensor in tensors.values())
        where |= dict.fromkeys(tensors, file)
    if (checkpoint.directory / INDEX).exists():
        directory.write(INDEX, json.dumps({"metadata": {"total_size": after}, "weight_map": where}, indent=1))
    return before, after
