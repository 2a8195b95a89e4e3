"""The tokenizer and the two corpora of the comparison in docs/results/training.md.

    python -m lab.runs.train_prepare TEXTS data/books

TEXTS holds classic_books_train.txt.xz and classic_books_valid.txt.xz: public-domain books, each ended by a line ``<|endoftext|>``. A
byte-level BPE of 16,384 words is trained on every third book and written to ``data/books/tokenizer``; the corpora beside it. Its
training is not the same to the last word each time: 3 of the 16,384 differed between two.
"""

import argparse
import lzma
import subprocess
import sys
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

END = "<|endoftext|>"
WORDS = 16384


def train_tokenizer(text, target):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=WORDS, special_tokens=[END], initial_alphabet=alphabet)
    books = text.split(f"\n{END}\n")
    tokenizer.train_from_iterator((line for book in books[::3] for line in book.split("\n")), trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, bos_token=END).save_pretrained(target)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("texts", type=Path)
    parser.add_argument("target", type=Path)
    arguments = parser.parse_args()
    files = {part: arguments.texts / f"classic_books_{part}.txt.xz" for part in ("train", "valid")}
    tokenizer = arguments.target / "tokenizer"
    train_tokenizer(lzma.decompress(files["train"].read_bytes()).decode("utf-8"), tokenizer)
    for part, file in files.items():
        words = ["data", "prepare", file, arguments.target / part, "--tokenizer", tokenizer, "--document-separator", END]
        subprocess.run([sys.executable, "-m", "ladder_residual", *map(str, words)], check=True)


if __name__ == "__main__":
    main()
