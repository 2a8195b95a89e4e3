"""fp8 of a plain checkpoint, in the layout of compressed-tensors: a scale per output row, activations quantised as they come, so that
no calibration is needed. vLLM and transformers load it."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ...common.suggest import did_you_mean
from ..checkpoint_reader import Checkpoint
from ..checkpoint_writer import DirectoryWriter, rewrite_weights
from ..sharding import is_projection

if TYPE_CHECKING:
    from torch import Tensor

    from ..preflight import CheckedSource

FORMATS = ("fp8",)
LARGEST = 448.0  # of E4M3
_DECODER_LAYER = re.compile(r"(?:^|\.)layers\.[0-9]+\.")
_NUMBERS = {"num_bits": 8, "type": "float", "symmetric": True}


def check_quantizable(found: CheckedSource, to: str) -> None:
    """ValueError unless there is something plain to quantise; before torch is imported."""
    checkpoint = found.checkpoint
    if to not in FORMATS:
        raise ValueError(f"unknown format --quantize {to!r}{did_you_mean(to, FORMATS)}; choose {', '.join(FORMATS)}")
    if checkpoint.quantised and found.adapter is None:  # else they are merged, and plain, first
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


def fp8_per_channel(name: str, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Numbers in E4M3 and a scale for each row. The scale is rounded first, so that numbers are right for the one that is stored."""
    import torch

    from ..finite import cast_finite

    values = cast_finite(name, weight, torch.float32)
    scale = values.abs().amax(1, keepdim=True) / LARGEST
    # float16 cannot hold the scale of small weights
    scale = scale.to(torch.bfloat16 if weight.dtype == torch.bfloat16 else torch.float32)
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)  # a row of zeros, or so small that its scale is
    numbers = (values / scale.to(torch.float32)).clamp(-LARGEST, LARGEST)
    return numbers.to(torch.float8_e4m3fn), scale


def write_fp8(checkpoint: Checkpoint, directory: DirectoryWriter, change: Callable[[str, Tensor], Tensor]) -> tuple[int, int]:
    """The files of ``checkpoint``, the projections of what ``change`` makes of it quantised: bytes of the weights before and after."""

    def quantise(name: str, tensor: Tensor) -> dict[str, Tensor]:
        tensor = change(name, tensor)
        if not is_quantized(name):
            return {name: tensor}
        numbers, scale = fp8_per_channel(name, tensor)
        return {name: numbers, name + "_scale": scale}

    return rewrite_weights(checkpoint, directory, quantise)
