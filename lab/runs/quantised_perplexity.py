"""Perplexity of a checkpoint on WikiText-2 before and after quantisation, as ``ladder convert --quantize fp8|int4`` writes it: rounded to
the nearest number, and with ``--refit`` on a mix of texts.

    python -m lab.runs.quantised_perplexity smollm2 TEXTS --out results/quantisation/smollm2.json

TEXTS holds wikitext2_test.raw.xz to measure on, and the calibration texts that ``lab.runs.adapt_refit`` names. The same rows go
through each model, in float32, so that differences are those of the weights and have a paired standard error. Activations are not
quantised. Results are in nats per token.
"""

from __future__ import annotations

import argparse
import math
import statistics
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lab.output import finish
from lab.runs.adapt_refit import CHECKS, rows_of, write_mixed
from ladder_residual.adapt.refit_checkpoint import refit
from ladder_residual.common.environment import environment
from ladder_residual.data.encoder import Encoder
from ladder_residual.data.tokenizer import read_tokenizer
from ladder_residual.models.convert import convert
from ladder_residual.models.loading import load_model
from ladder_residual.models.preflight import check_source
from ladder_residual.models.quantization.write import FORMATS, is_quantized

TEXT = CHECKS["wikitext2"]


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
    parser.add_argument("texts", type=Path)
    parser.add_argument("--rows", type=int, default=24)
    parser.add_argument("--sequence", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=15_360, help="of calibration")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    encoder = Encoder(read_tokenizer(asked.checkpoint), int(check_source(asked.checkpoint).fields["vocab_size"]))
    with tempfile.TemporaryDirectory() as scratch:
        rows = rows_of(asked.texts / TEXT, encoder, asked.sequence, asked.rows, Path(scratch))
        mixed = write_mixed(asked.texts, Path(scratch))
        models = {"bf16": asked.checkpoint}
        for format in FORMATS:
            models[format] = Path(scratch) / format
            convert(asked.checkpoint, models[format], quantize=format)
            models[f"{format} refit"] = Path(scratch) / f"{format}-refit"
            refit(asked.checkpoint, models[f"{format} refit"], None, mixed, quantize=format, tokens=asked.tokens)
        found = {name: losses(path, rows) for name, path in models.items()}
        errors = {name: weight_error(path, asked.checkpoint) for name, path in models.items()}
        kinds = {name: check_source(path).quantization for name, path in models.items()}
    result: dict[str, Any] = {
        **environment(),
        "model": asked.checkpoint.name,
        "text": TEXT,
        "calibration_tokens": asked.tokens,
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
