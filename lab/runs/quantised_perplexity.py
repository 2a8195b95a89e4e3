"""Perplexity of a checkpoint on WikiText-2 before and after quantisation: fp8 as ``ladder convert --quantize fp8`` writes it, and int4
rounded to nearest, symmetric, packed by compressed-tensors.

    python -m lab.runs.quantised_perplexity smollm2 wikitext2_test.raw.xz --out results/quantisation/smollm2.json

The same rows go through each model, in float32, so that differences are those of the weights and have a paired standard error.
Activations are not quantised. Results are in nats per token.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lab.output import finish
from ladder_residual.adapt.auto import full_rows
from ladder_residual.common.environment import environment
from ladder_residual.data.encoder import Encoder
from ladder_residual.data.tokenizer import read_tokenizer
from ladder_residual.models.checkpoint_writer import new_directory, rewrite_weights
from ladder_residual.models.convert import convert, files_along
from ladder_residual.models.loading import load_model
from ladder_residual.models.preflight import check_source
from ladder_residual.models.quantization.write import is_quantized


def int4_config(group: int) -> dict[str, Any]:
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": group}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head"],
    }


def write_int4(source: Path, target: Path, group: int) -> None:
    """Round to nearest: the largest number of a group becomes 7 or -8, nothing is calibrated."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    config = int4_config(group)
    scheme = QuantizationConfig(**config).config_groups["group_0"]
    packer: Any = BaseCompressor.get_value_from_registry("pack-quantized")

    def quantise(name: str, tensor: Tensor) -> dict[str, Tensor]:
        if not is_quantized(name):
            return {name: tensor}
        weight = tensor.float()
        scale = (weight.unflatten(1, (-1, group)).abs().amax(-1) / 7.5).to(torch.bfloat16)
        packed = packer.compress({"weight": weight, "weight_scale": scale.float()}, scheme)
        return {f"{name.removesuffix('.weight')}.{part}": value for part, value in packed.items()}

    checkpoint = check_source(source).checkpoint
    with new_directory(target) as directory:
        rewrite_weights(checkpoint, directory, quantise)
        for name in files_along(checkpoint.directory):
            directory.copy(source / name, name)
        directory.write("config.json", json.dumps(checkpoint.config | {"quantization_config": config}))


@torch.no_grad()
def weight_error(source: Path, original: Path) -> float:
    """Of the quantised projections: root of the squared difference over the squared weights, in per cent."""
    ours, theirs = check_source(source).checkpoint, check_source(original).checkpoint
    different = total = 0.0
    for name in filter(is_quantized, theirs.names):
        weight = theirs.read(name).float()
        different += float((ours.read(name).float() - weight).square().sum())
        total += float(weight.square().sum())
    return 100 * math.sqrt(different / total)


@torch.no_grad()
def losses(source: Path, rows: Tensor) -> list[float]:
    """Mean loss of each row."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "weights in .* are dequantised")
        model = load_model(source, dtype="fp32")
    return [float(model(row[None], labels=row[None]).loss) for row in rows]


def compared(found: list[float], original: list[float]) -> dict[str, float]:
    differences = [ours - theirs for ours, theirs in zip(found, original, strict=True)]
    return {
        "loss": statistics.mean(found),
        "perplexity": math.exp(statistics.mean(found)),
        "rise_percent": 100 * math.expm1(statistics.mean(differences)),
        "rise_percent_stderr": 100 * statistics.stdev(differences) / math.sqrt(len(differences)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("text")
    parser.add_argument("--rows", type=int, default=24)
    parser.add_argument("--sequence", type=int, default=512)
    parser.add_argument("--group", type=int, default=64)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    encoder = Encoder(read_tokenizer(asked.checkpoint), int(check_source(asked.checkpoint).fields["vocab_size"]))
    rows = torch.from_numpy(full_rows(asked.text, encoder, asked.sequence, asked.rows, 2))
    with tempfile.TemporaryDirectory() as scratch:
        models = {"bf16": asked.checkpoint, "fp8": Path(scratch) / "fp8", "int4": Path(scratch) / "int4"}
        convert(asked.checkpoint, models["fp8"], quantize="fp8")
        write_int4(asked.checkpoint, models["int4"], asked.group)
        found = {name: losses(path, rows) for name, path in models.items()}
        errors = {name: weight_error(path, asked.checkpoint) for name, path in models.items()}
        kinds = {name: check_source(path).quantization for name, path in models.items()}
    result: dict[str, Any] = {
        **environment(),
        "model": asked.checkpoint.name,
        "text": Path(asked.text).name,
        "rows": len(rows),
        "sequence": asked.sequence,
        "weights": {name: kind.describe() if kind else "bf16" for name, kind in kinds.items()},
        "weight_error_percent": errors,
        "results": {name: compared(row_losses, found["bf16"]) for name, row_losses in found.items()},
        "row_losses": found,
    }
    finish(result, asked.out)


if __name__ == "__main__":
    main()
