"""Packed token rows of the texts that ``lab/runs/adapt_smollm2.py`` recovers SmolLM2 with, in a few small files.

    python -m lab.runs.adapt_prepare smollm2 TEXTS rows

TEXTS holds classic_books_train.txt.xz, classic_books_valid.txt.xz, gsm8k_train.jsonl.xz, wikitext2_test.raw.xz and reference.jsonl.xz
(``lab/runs/adapt_reference.py``). WikiText is measured on and never trained on; of the books seven whole ones are held out.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import numpy as np

from ladder_residual.data.encoder import LEARN, Encoder
from ladder_residual.data.packing import build_rows
from ladder_residual.data.tokenizer import read_tokenizer

SEQUENCE = 1024
TEXTS = {
    "books": "classic_books_train.txt.xz",
    "books_heldout": "classic_books_valid.txt.xz",
    "wikitext2": "wikitext2_test.raw.xz",
    "gsm8k": "gsm8k_train.jsonl.xz",
    "reference": "reference.jsonl.xz",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("texts", type=Path)
    parser.add_argument("target", type=Path)
    arguments = parser.parse_args()
    tokenizer = read_tokenizer(arguments.model)
    encoder = Encoder(tokenizer, len(tokenizer))
    arguments.target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        for name, file in TEXTS.items():
            store = build_rows(str(arguments.texts / file), encoder, SEQUENCE, Path(scratch))
            ids, use = store.ids.astype(np.uint16), np.asarray(store.use)
            if (use[:-1] == LEARN).all():
                ids, use = ids[:-1], use[:-1]  # plain text: only the last row is not full
            else:
                np.save(arguments.target / f"{name}.use.npy", use)
            np.save(arguments.target / f"{name}.npy", ids)
            print(f"{name:14} {len(ids):6,} rows of {SEQUENCE}")


if __name__ == "__main__":
    main()
