"""``ladder data prepare``: documents to tokens, in several processes, into shards that are the same however many there are.

One process reads, cuts and writes; the others only turn text into token ids. Results are taken in the order of the documents, so
neither the number of workers nor an interruption changes a byte of the result.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..models.checkpoint_reader import resolve
from .corpus import INDEX, Corpus
from .corpus_writer import DEFAULT_SHARD_TOKENS, CorpusWriter
from .documents import Messages, document_of
from .failures import failures_of
from .sources import MAX_CHUNK, Record, Source, SourceOptions, find_sources

_BATCH_CHARACTERS = 1 << 18  # of text handed to a worker at once
_BATCH_ITEMS = 1024


@dataclass(frozen=True, kw_only=True)
class PrepareSettings:
    """What decides the result. The number of workers does not."""

    text_fields: tuple[str, ...] = ("text",)  # of JSON lines, parquet and datasets; several are joined by a line break
    shard_tokens: int = DEFAULT_SHARD_TOKENS
    limit: int | None = None  # documents
    end_of_document: str | None = None  # token
    options: SourceOptions = field(default_factory=SourceOptions)

    def __post_init__(self) -> None:
        if self.shard_tokens < 1:
            raise ValueError(f"--shard-tokens must be at least 1, got {self.shard_tokens}")
        if self.limit is not None and self.limit < 1:
            raise ValueError(f"--limit must be at least 1, got {self.limit}")


class Item(NamedTuple):
    """A chunk of a document, still text or already tokens."""

    text: str
    ids: NDArray[np.int64] | None
    first: bool  # of its document, and of a kind that gets the tokenizer's own first token
    last: bool
    place: str


@dataclass(frozen=True)
class Report:
    """Where a run is, for whoever draws the bar."""

    documents: int
    tokens: int
    bytes_read: int
    bytes_total: int | None


def check_request(names: list[str], directory: Path, tokenizer_source: str, settings: PrepareSettings) -> list[Source]:
    """The sources; ValueError if one of them or the tokenizer is not there, or ``directory`` is no place for a corpus. Before anything
    is imported that takes seconds."""
    if (directory / "config.json").exists():
        raise ValueError(f"{directory} is a checkpoint; choose another directory for the corpus")
    if not Path(tokenizer_source).is_file():
        resolve(tokenizer_source, weights=False)
    return find_sources(names, settings.options)


def prepare(
    names: list[str],
    directory: Path,
    tokenizer_source: str,
    settings: PrepareSettings,
    *,
    workers: int = 1,
    overwrite: bool = False,
    report: Callable[[Report], None] = lambda report: None,
) -> Corpus:
    """Tokenise the sources into ``directory``; go on where an interrupted run with the same settings stopped."""
    if workers < 1:
        raise ValueError(f"--workers must be at least 1, got {workers}")
    sources = check_request(names, directory, tokenizer_source, settings)
    from .tokenizer import TextToIds, end_of_document, read_tokenizer, tokenizer_digest, vocabulary_size

    tokenizer = read_tokenizer(tokenizer_source)
    text_to_ids = TextToIds.of(tokenizer)
    digest = tokenizer_digest(tokenizer)
    prepared = {
        "sources": [source.identity for source in sources],
        "text_fields": list(settings.text_fields),
        "document_separator": settings.options.document_separator,
        "limit": settings.limit,
        "shard_tokens": settings.shard_tokens,
    }
    about_tokenizer = {"source": str(tokenizer_source), "digest": digest}
    ends = end_of_document(tokenizer, settings.end_of_document)
    if not overwrite and (directory / INDEX).exists():
        existing = Corpus.open(directory)
        if (existing.prepared, existing.tokenizer, existing.end_of_document) == (prepared, about_tokenizer, ends):
            return existing
    with CorpusWriter(
        directory,
        vocabulary_size(tokenizer),
        ends,
        shard_tokens=settings.shard_tokens,
        tokenizer=about_tokenizer,
        prepared=prepared,
        overwrite=overwrite,
    ) as writer:
        chosen = _selected(sources, writer.consumed, settings.limit)
        items = (item for record in chosen for item in to_items(record, settings.text_fields, tokenizer, digest))
        for number, (tokens, item) in enumerate(_tokenised(items, text_to_ids.serialized, workers)):
            if item.first and len(tokens):
                tokens = np.concatenate([text_to_ids.before, tokens])
            writer.add(tokens, last=item.last, place=item.place)
            if number % 64 == 0:
                report(_report(writer, sources))
        corpus = writer.finish()
        report(_report(writer, sources))
        return corpus


def _report(writer: CorpusWriter, sources: list[Source]) -> Report:
    sizes = [source.size for source in sources]
    known = sum(size for size in sizes if size is not None) if None not in sizes else None
    return Report(writer.documents, writer.tokens, sum(source.position() for source in sources), known)


def _selected(sources: list[Source], skip: int, limit: int | None) -> Iterator[Record]:
    """Records of the documents from number ``skip`` on, up to number ``limit``."""
    number = 0
    for record in itertools.chain.from_iterable(source.records() for source in sources):
        if limit is not None and number >= limit:
            return
        if number >= skip:
            yield record
        number += record.last


def to_items(record: Record, text_fields: tuple[str, ...], tokenizer: Any, digest: str) -> Iterator[Item]:
    """What to tokenise of a record: its ids, its text in chunks, or its chat through the template."""
    place = record.place
    document = document_of(record.row, place, text_fields)
    if document.ids is not None:
        if document.tokenizer not in (None, digest):
            raise ValueError(
                f"{place}: its ids are of another tokenizer ({document.tokenizer}, this one is {digest}); "
                "prepare them with theirs, or write samples with --write text"
            )
        yield Item("", np.array(document.ids, np.int64), False, record.last, place)
        return
    if document.messages is not None:
        text, first = _chat(document.messages, place, tokenizer), False
    else:
        text, first = document.text or "", record.first
    chunks = list(_chunks(text))
    for number, chunk in enumerate(chunks):
        yield Item(chunk, None, first and number == 0, record.last and number == len(chunks) - 1, place)


def _chunks(text: str) -> Iterator[str]:
    """At most MAX_CHUNK characters each, cut after a line end where there is one."""
    start = 0
    while len(text) - start > MAX_CHUNK:
        cut = text.rfind("\n", start, start + MAX_CHUNK) + 1
        cut = cut if cut > start else start + MAX_CHUNK
        yield text[start:cut]
        start = cut
    yield text[start:]


def _chat(messages: Messages, place: str, tokenizer: Any) -> str:
    if not tokenizer.chat_template:
        raise ValueError(f"{place} is a chat, but the tokenizer has no chat template")
    with failures_of(f"{place}: the chat template refuses these messages"):
        return str(tokenizer.apply_chat_template(messages, tokenize=False))


def _tokenised(items: Iterator[Item], serialized: str, workers: int) -> Iterator[tuple[NDArray[np.int64], Item]]:
    """Each item with its tokens, in order."""
    if workers == 1:
        _start_worker(serialized, own_process=False)
        for batch in _batches(items):
            yield from _merged(batch, _encode([item.text for item in batch]))
        return
    # Started anew, not forked: the reader's threads and open files are not theirs.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_start_worker, initargs=(serialized,)) as pool:
        running: deque[tuple[list[Item], Future[Any]]] = deque()
        batches = _batches(items)
        try:
            while True:
                for batch in itertools.islice(batches, 2 * workers - len(running)):  # enough ahead, and bounded memory
                    running.append((batch, pool.submit(_encode, [item.text for item in batch])))
                if not running:
                    return
                batch, future = running.popleft()
                yield from _merged(batch, future.result())
        except BrokenProcessPool as error:
            raise ValueError(
                "a worker died (out of memory?); finished shards are kept: run again with fewer --workers"
            ) from error
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _batches(items: Iterator[Item]) -> Iterator[list[Item]]:
    batch: list[Item] = []
    characters = 0
    for item in items:
        batch.append(item)
        characters += len(item.text)
        if characters >= _BATCH_CHARACTERS or len(batch) >= _BATCH_ITEMS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _merged(batch: list[Item], encoded: tuple[NDArray[np.int64], list[int]]) -> Iterator[tuple[NDArray[np.int64], Item]]:
    tokens, lengths = encoded
    for item, ids in zip(batch, np.split(tokens, np.cumsum(lengths)[:-1]), strict=True):
        yield (item.ids if item.ids is not None else ids), item


_worker_tokenizer: Any = None  # of this process: a worker serves one run


def _start_worker(serialized: str, own_process: bool = True) -> None:
    global _worker_tokenizer
    if own_process:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # processes, not threads within them
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the reader decides
        if sys.platform == "linux":
            import ctypes

            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: a killed reader leaves no workers behind
    from tokenizers import Tokenizer

    _worker_tokenizer = Tokenizer.from_str(serialized)


def _encode(texts: list[str]) -> tuple[NDArray[np.int64], list[int]]:
    """All token ids in one block, and how many are each text's."""
    with failures_of("the tokenizer fails on a text"):
        encoded = [encoding.ids for encoding in _worker_tokenizer.encode_batch_fast(texts, add_special_tokens=False)]
    return np.fromiter(itertools.chain.from_iterable(encoded), np.int64), [len(ids) for ids in encoded]
