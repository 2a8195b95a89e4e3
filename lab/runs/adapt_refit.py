"""What a refit alone recovers of a converted SmolLM2; writes results/adapt/refit.json.

    python -m lab.runs.fetch_smollm2 smollm2
    python -m lab.runs.adapt_refit smollm2 TEXTS --out results/adapt/refit.json

TEXTS holds classic_books_train.txt.xz, classic_books_valid.txt.xz, gsm8k_train.jsonl.xz, wikitext2_valid_tokens.txt.xz and
wikitext2_test.raw.xz. Calibration takes the first three kinds in turn (books, arithmetic, WikiText-2's validation split); losses are of
seven other books and of WikiText-2's test split.
"""

from __future__ import annotations

import argparse
import itertools
import json
import lzma
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from ladder_residual.adapt.auto import full_rows
from ladder_residual.adapt.probe import Probe
from ladder_residual.adapt.refit import Refit
from ladder_residual.adapt.refit_checkpoint import SEQUENCE
from ladder_residual.common.environment import environment
from ladder_residual.core.config import Wiring
from ladder_residual.data.encoder import Encoder
from ladder_residual.data.tokenizer import read_tokenizer
from ladder_residual.models.loading import load_model

PASSAGE = 4000  # characters
CHECKS = {"books_heldout": "classic_books_valid.txt.xz", "wikitext2": "wikitext2_test.raw.xz"}
CHECK_ROWS = 8
CHOSEN = "ladder:4,5,6,8,9,10,14,20,21,22,23,24,25,26,27"  # by convert --wiring auto


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("texts", type=Path)
    parser.add_argument("--wirings", default=f"ladder:last-half;{CHOSEN};ladder", help="Separated by semicolons.")
    parser.add_argument("--tokens", default="15360,61440", help="Of calibration, separated by commas.")
    parser.add_argument("--out", type=Path, default=Path("results/adapt/refit.json"))
    arguments = parser.parse_args()
    tokenizer = read_tokenizer(arguments.model)
    encoder = Encoder(tokenizer, len(tokenizer))
    counts = [int(text) for text in arguments.tokens.split(",")]
    with tempfile.TemporaryDirectory() as scratch:
        mixed = write_mixed(arguments.texts, Path(scratch))
        rows = torch.from_numpy(full_rows(str(mixed), encoder, SEQUENCE, max(counts) // SEQUENCE, max(counts) // SEQUENCE))
        checks = {
            name: rows_of(arguments.texts / file, encoder, SEQUENCE, CHECK_ROWS, Path(scratch)) for name, file in CHECKS.items()
        }
    result: dict[str, Any] = {"benchmark": "refit", "model": "SmolLM2-135M-Instruct (4-bit weights)", "rows": []}
    result |= {"calibration": "books, GSM8K, WikiText-2 validation", "check_tokens": CHECK_ROWS * SEQUENCE} | environment()
    for spec, count in itertools.product(arguments.wirings.split(";"), counts):
        result["rows"].append(measured(arguments.model, spec, rows[: count // SEQUENCE], checks))
        print(json.dumps(result["rows"][-1]), flush=True)
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")


def rows_of(file: Path, encoder: Encoder, sequence: int, count: int, scratch: Path) -> torch.Tensor:
    """The first rows of a packed text."""
    plain = scratch / f"{file.name}.txt"
    plain.write_bytes(lzma.decompress(file.read_bytes())[:1_000_000])
    return torch.from_numpy(full_rows(str(plain), encoder, sequence, count, count))


def write_mixed(texts: Path, folder: Path) -> Path:
    """The text to calibrate on."""
    mixed = folder / "mixed.jsonl"
    mixed.write_text("".join(json.dumps({"text": text}) + "\n" for text in itertools.islice(passages(texts), 2000)))
    return mixed


def passages(texts: Path) -> Iterator[str]:
    """By turns of the three calibration texts, from all over each."""
    books = lzma.decompress((texts / "classic_books_train.txt.xz").read_bytes()).decode()
    starts = range(0, len(books) - PASSAGE, len(books) // 1000)
    wiki = lzma.decompress((texts / "wikitext2_valid_tokens.txt.xz").read_bytes()).decode().replace("<unk>", "")
    sums = lzma.decompress((texts / "gsm8k_train.jsonl.xz").read_bytes()).decode().strip().split("\n")
    for number, start in enumerate(starts):
        yield books[start : start + PASSAGE]
        yield wiki[number * PASSAGE : (number + 1) * PASSAGE] or books[start + PASSAGE : start + 2 * PASSAGE]
        questions = (json.loads(line) for line in sums[6 * number : 6 * number + 6])
        yield "\n\n".join(f"{each['question']}\n{each['answer']}" for each in questions)


def measured(source: str, spec: str, rows: torch.Tensor, checks: dict[str, torch.Tensor]) -> dict[str, Any]:
    model = load_model(source, dtype="fp32")
    wiring = Wiring.parse(spec, model.config.num_hidden_layers)
    losses: dict[str, dict[str, float]] = {}
    for name, check in checks.items():
        probe = Probe(model, check)
        losses[name] = {"original": probe.original.loss, "converted": probe.cost(wiring.layers).loss}
    began = time.monotonic()
    projections = len(Refit(model, wiring, rows).run())
    seconds = time.monotonic() - began
    for name, check in checks.items():
        losses[name]["refitted"] = Probe(model, check).cost(wiring.layers).loss
    return {"wiring": spec, "tokens": rows.numel(), "projections": projections, "seconds": round(seconds, 1), "losses": losses}


if __name__ == "__main__":
    main()
