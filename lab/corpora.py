"""Corpora of made-up documents."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from ladder_residual.data.corpus import Corpus
from ladder_residual.data.corpus_writer import DEFAULT_SHARD_TOKENS, CorpusWriter


def write_corpus(
    directory: str | Path,
    documents: Iterable[Sequence[int]],
    *,
    vocab_size: int,
    end_of_document: int,
    shard_tokens: int = DEFAULT_SHARD_TOKENS,
) -> Corpus:
    """A corpus from token lists in memory. The end-of-document token is added where a document lacks it."""
    with CorpusWriter(Path(directory), vocab_size, end_of_document, shard_tokens=shard_tokens) as writer:
        for document in documents:
            writer.add(document)
        return writer.finish()
