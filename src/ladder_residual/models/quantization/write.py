"""A plain checkpoint in fp8 or int4, in the layouts of compressed-tensors, which vLLM and transformers load."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ...common.suggest import did_you_mean
from ..checkpoint_reader import Checkpoint
from ..checkpoint_writer import DirectoryWriter, rewrite_weights
from ..sharding import is_projection
from .rounding import Format, Fp8, Int4, Rounded
from .spec import GROUPS

if TYPE_CHECKING:
    from torch import Tensor

    from ..preflight import CheckedSource

FORMATS = (Fp8.name, Int4.name)
_DECODER_LAYER = re.compile(r"(?:^|\.)layers\.[0-9]+\.")


def checked_format(found: CheckedSource, to: str) -> Format:
    """ValueError unless there is something plain to quantise; before torch is imported."""
    checkpoint = found.checkpoint
    if to not in FORMATS:
        raise ValueError(f"unknown format --quantize {to!r}{did_you_mean(to, FORMATS)}; choose {' or '.join(FORMATS)}")
    if checkpoint.quantised and found.adapter is None:  # else they are merged, and plain, first
        raise ValueError(
            f"{checkpoint.directory} is quantised already: leave out --quantize, or give the model it was quantised from"
        )
    stacked = next((name for name in checkpoint.names if ".experts." in name and len(checkpoint.shape(name)) == 3), None)
    if stacked is not None:
        raise ValueError(
            f"{checkpoint.directory} stores its experts stacked ({stacked}), and {to} is written for experts one by one, as published "
            f"checkpoints have them: load it with transformers and save_pretrained it, which unstacks them"
        )
    return Fp8() if to == Fp8.name else Int4(_group(checkpoint))


def _group(checkpoint: Checkpoint) -> int:
    """The largest that divides the columns of every projection."""
    columns = {checkpoint.shape(name)[1]: name for name in checkpoint.names if is_quantized(name)}
    for group in sorted(GROUPS, reverse=True):
        if not any(width % group for width in columns):
            return group
    width = next(width for width in columns if width % min(GROUPS))
    raise ValueError(
        f"{checkpoint.directory}: {columns[width]} has {width} columns, and int4 needs groups of {', '.join(map(str, GROUPS))}: "
        f"use --quantize fp8"
    )


def is_quantized(name: str) -> bool:
    """The projections of decoder layers; not the embedding, the head, norms and routers."""
    return bool(_DECODER_LAYER.search(name)) and is_projection(name)


def config_of(checkpoint: Checkpoint, format: Format) -> dict[str, Any]:
    """``quantization_config``. What is left plain is listed by module, routers by the end of their name: transformers renames some."""
    plain = {name.removesuffix(".weight") for name in checkpoint.names if _plain_matrix(checkpoint, name)}
    ends = sorted({module.rpartition(".")[2] for module in plain if _DECODER_LAYER.search(module)})
    return {
        "quant_method": "compressed-tensors",
        "format": format.layout,
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": format.weights,
                "input_activations": format.activations,
                "output_activations": None,
            }
        },
        "ignore": ["lm_head", *(rf"re:.*\.{re.escape(end)}$" for end in ends)],
        "kv_cache_scheme": None,
    }


def _plain_matrix(checkpoint: Checkpoint, name: str) -> bool:
    return name.endswith(".weight") and len(checkpoint.shape(name)) == 2 and not is_quantized(name)


def write_quantized(
    checkpoint: Checkpoint,
    directory: DirectoryWriter,
    format: Format,
    change: Callable[[str, Tensor], Tensor],
    rounded: Mapping[str, Rounded],
) -> tuple[int, int]:
    """The files of ``checkpoint``, the projections of what ``change`` makes of it quantised: bytes of the weights before and after.
    ``rounded``: projections that are rounded already, by the name they are stored under."""

    def quantise(name: str, tensor: Tensor) -> Mapping[str, Tensor]:
        tensor = change(name, tensor)
        if not is_quantized(name):
            return {name: tensor}
        found = rounded.get(name) or format.round(name, tensor, tensor.dtype)
        return format.stored(name.removesuffix(".weight"), found)

    return rewrite_weights(checkpoint, directory, quantise)
