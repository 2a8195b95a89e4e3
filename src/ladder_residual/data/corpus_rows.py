"""Rows of tokens for a training loop: a pure function of (corpus, sequence, seed, position), so there is one integer to save.

    rows = CorpusRows(Corpus.open("corpus"), sequence=1024, seed=0)
    batch = rows.batch(position, count)                        # the global batch at this position
    local = rows.batch(position + rank * per_rank, per_rank)   # one rank's part of it

The corpus is packed: its stream of documents is cut into rows of ``sequence`` tokens, and each epoch visits every row once, in
an order that depends on the seed and the epoch alone. Every token is an input exactly once an epoch. Labels follow Hugging Face:
equal to the inputs, shifted inside the model, -100 where there is nothing to predict (the padding of the stream's last row).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .corpus import Corpus
from .permutation import permuted

IGNORE_INDEX = -100  # as in torch and transformers


@dataclass(frozen=True)
class CorpusRows:
    corpus: Corpus
    sequence: int
    seed: int = 0
    shuffle: bool = True
    # Adds ``position_ids`` that start again at 0 in every document. Hugging Face models given those, no attention mask and
    # ``use_cache=False`` keep attention inside documents.
    document_positions: bool = False

    def __post_init__(self) -> None:
        if self.sequence < 2:
            raise ValueError(f"a row needs at least 2 tokens to predict one of them, got sequence={self.sequence}")
        if self.seed < 0:
            raise ValueError(f"the seed must not be negative, got {self.seed}")
        if self.corpus.tokens == 0:
            raise ValueError(f"{self.corpus.directory} holds no tokens")

    @property
    def per_epoch(self) -> int:
        return -(-self.corpus.tokens // self.sequence)

    def order(self, position: int, count: int) -> NDArray[np.int64]:
        """Which rows of the stream stand at ``position`` and after."""
        if position < 0 or count < 0:
            raise ValueError(f"position and count must not be negative, got {position} and {count}")
        positions = np.arange(position, position + count, dtype=np.int64)
        epochs, within = np.divmod(positions, self.per_epoch)
        if self.shuffle:
            for epoch in np.unique(epochs):
                here = epochs == epoch
                within[here] = permuted(within[here], self.per_epoch, self.seed, int(epoch))
        return within

    def batch(self, position: int, count: int) -> dict[str, Tensor]:
        """``count`` rows from ``position`` on, counted over all epochs: input_ids and labels, [count, sequence]."""
        rows = self.order(position, count)
        inputs = np.full((count, self.sequence), self.corpus.end_of_document, np.int64)
        labels = np.full_like(inputs, IGNORE_INDEX)
        for target, row in enumerate(rows.tolist()):
            start = row * self.sequence
            tokens = self.corpus.read(start, min(start + self.sequence, self.corpus.tokens))
            inputs[target, : len(tokens)] = labels[target, : len(tokens)] = tokens
        batch = {"input_ids": torch.from_numpy(inputs), "labels": torch.from_numpy(labels)}
        if self.document_positions:
            batch["position_ids"] = torch.from_numpy(self._positions(rows))
        return batch

    def _positions(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """How far each token is from the start of its document, or of the row where the document began before it."""
        stream = rows[:, None] * self.sequence + np.arange(self.sequence)
        starts = np.concatenate([[0], self.corpus.document_ends])
        began = starts[np.searchsorted(starts, stream, side="right") - 1]
        return stream - np.maximum(began, rows[:, None] * self.sequence)
