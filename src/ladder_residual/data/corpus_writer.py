"""Writing a corpus: whole shards or none, and an index at the very end, so that a killed run can go on where it stopped.

A shard is written under a temporary name, flushed to disk and renamed; then ``progress.json`` is replaced by one that lists it.
Shards close when a document brings them to ``shard_tokens``: their borders depend on the documents alone, so a run that was
interrupted gives the same bytes as one that was not.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import ArrayLike

from ..common.locks import Lock
from ..models.checkpoint_reader import INDEX_BYTES, read_json
from .corpus import ENDS_DTYPE, INDEX, TOKEN_DTYPES, Corpus, Shard, dtype_for, read_shards

PROGRESS = "progress.json"
PARTIAL = ".partial"
DEFAULT_SHARD_TOKENS = 1 << 26


class CorpusWriter:
    """Use as a context manager, which begins, or goes on after the last finished shard of a run with the same settings; ``overwrite``
    drops what is there. Whatever happens, no half-written file stays behind."""

    def __init__(
        self,
        directory: Path,
        vocab_size: int,
        end_of_document: int,
        *,
        shard_tokens: int = DEFAULT_SHARD_TOKENS,
        tokenizer: dict[str, Any] | None = None,
        prepared: dict[str, Any] | None = None,
        overwrite: bool = False,
    ) -> None:
        if shard_tokens < 1:
            raise ValueError(f"a shard needs at least 1 token, got {shard_tokens}")
        if not 0 <= end_of_document < vocab_size:
            raise ValueError(f"the end-of-document token {end_of_document} is outside the vocabulary of {vocab_size}")
        self.directory, self.vocab_size, self.end_of_document = directory, vocab_size, end_of_document
        self.dtype, self.shard_tokens, self.overwrite = dtype_for(vocab_size), shard_tokens, overwrite
        self.tokenizer, self.prepared = tokenizer or {}, prepared or {}
        self.shards: list[Shard] = []
        self.consumed = 0  # documents of the source that finished shards account for, the skipped ones included
        self._pending = 0  # the same, of the shard being written
        self._open: _OpenShard | None = None

    def __enter__(self) -> CorpusWriter:
        with writing_to(self.directory):
            self.directory.mkdir(parents=True, exist_ok=True)
        self._lock = Lock(self.directory)  # first of all: what is there may be another run's
        try:
            if self.overwrite:
                discard_corpus(self.directory)
            if (self.directory / INDEX).exists():
                raise ValueError(f"{self.directory} already holds a corpus; choose another directory or use --overwrite")
            self._resume()
        except BaseException:
            self._lock.release()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._open is not None:
            self._open.discard()
        self._lock.release()

    def _resume(self) -> None:
        path = self.directory / PROGRESS
        if path.exists():
            try:
                progress = read_json(path, INDEX_BYTES)
                consumed, settings = progress["consumed"], dict(progress["settings"])
                shards = read_shards(progress["shards"], consumed)
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"cannot read {path}: {error}; use --overwrite to start again") from error
            mine = json.loads(json.dumps(self._settings()))
            if settings != mine:
                different = sorted(name for name in mine if settings.get(name) != mine[name])
                raise ValueError(
                    f"{self.directory} holds an unfinished corpus of other settings ({', '.join(different)} differ); "
                    "repeat them, choose another directory or use --overwrite"
                )
            self._as_corpus(shards).check(checksums=True)
            self.shards, self.consumed = list(shards), consumed
        for left in self.directory.glob("*" + PARTIAL):
            left.unlink()

    def _settings(self) -> dict[str, Any]:
        own = {name: getattr(self, name) for name in ("vocab_size", "end_of_document", "shard_tokens", "tokenizer")}
        return own | self.prepared

    def _as_corpus(self, shards: Sequence[Shard]) -> Corpus:
        about = self.tokenizer, self.prepared
        return Corpus(self.directory, self.dtype, self.vocab_size, self.end_of_document, tuple(shards), *about)

    @property
    def tokens(self) -> int:
        return sum(shard.tokens for shard in self.shards) + (self._open.tokens if self._open else 0)

    @property
    def documents(self) -> int:
        return sum(shard.documents for shard in self.shards) + (len(self._open.ends) if self._open else 0)

    def add(self, tokens: ArrayLike, *, last: bool = True, place: str = "a document") -> None:
        """A document of the source, or a chunk of one (``last`` ends it). An empty one is counted, so that a resumed run skips it
        too, and not written."""
        chunk = np.asarray(tokens, np.int64)
        if len(chunk):
            if chunk.min() < 0 or chunk.max() >= self.vocab_size:
                wrong = int(chunk.max()) if chunk.max() >= self.vocab_size else int(chunk.min())
                raise ValueError(f"{place}: token {wrong} is outside the tokenizer's vocabulary of {self.vocab_size}")
            if self._open is None:
                self._open = _OpenShard.create(self.directory, f"{len(self.shards):05d}", TOKEN_DTYPES[self.dtype])
            self._open.write(chunk)
        if not last:
            return
        self._pending += 1
        if self._open is not None and self._open.in_document:
            if self._open.last != self.end_of_document:
                self._open.write(np.array([self.end_of_document]))
            self._open.ends.append(self._open.tokens)
            if self._open.tokens >= self.shard_tokens:
                self._close_shard()

    def _close_shard(self) -> None:
        assert self._open is not None
        self.shards.append(self._open.close())
        self._open = None
        self.consumed += self._pending
        self._pending = 0
        progress = {"settings": self._settings(), "consumed": self.consumed, "shards": [asdict(shard) for shard in self.shards]}
        write_json(self.directory / PROGRESS, progress)

    def finish(self) -> Corpus:
        if self._open is not None:
            self._close_shard()
        if not self.shards:
            raise ValueError("the source holds no document with any text: nothing to prepare")
        corpus = self._as_corpus(self.shards)
        write_json(self.directory / INDEX, corpus.index())
        (self.directory / PROGRESS).unlink(missing_ok=True)
        return corpus


def discard_corpus(directory: Path) -> None:
    """Remove a corpus, finished or not, and nothing else that lies in its directory."""
    lists = [directory / name for name in (INDEX, PROGRESS)]  # first: what is left after a kill must not pass for a corpus
    shards = [path for path in directory.iterdir() if re.fullmatch(r"\d{5,}\.(tokens|documents)|.*\.partial", path.name)]
    for path in lists + shards:
        path.unlink(missing_ok=True)


@dataclass
class _OpenShard:
    """The shard being written, under a temporary name."""

    directory: Path
    name: str
    file: BinaryIO
    dtype: np.dtype
    sha256: Any
    tokens: int = 0
    last: int = -1  # token
    ends: list[int] = field(default_factory=list)

    @classmethod
    def create(cls, directory: Path, name: str, dtype: np.dtype) -> _OpenShard:
        path = directory / f"{name}.tokens{PARTIAL}"
        with writing_to(path):
            return cls(directory, name, path.open("wb"), dtype, hashlib.sha256())

    def write(self, tokens: np.ndarray) -> None:
        data = tokens.astype(self.dtype).tobytes()
        with writing_to(self.directory / f"{self.name}.tokens"):
            self.file.write(data)
        self.sha256.update(data)
        self.tokens += len(tokens)
        self.last = int(tokens[-1])

    @property
    def in_document(self) -> bool:
        return self.tokens > (self.ends[-1] if self.ends else 0)

    def close(self) -> Shard:
        ends = np.array(self.ends, ENDS_DTYPE).tobytes()
        path = self.directory / f"{self.name}.tokens"
        with writing_to(path):
            self.file.flush()
            os.fsync(self.file.fileno())
            self.file.close()
        write_bytes(self.directory / f"{self.name}.documents", ends)
        with writing_to(path):
            os.replace(self.file.name, path)
        return Shard(self.name, self.tokens, len(self.ends), self.sha256.hexdigest(), hashlib.sha256(ends).hexdigest())

    def discard(self) -> None:
        with suppress(OSError):  # what is still buffered may not fit either
            self.file.close()
        Path(self.file.name).unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    write_bytes(path, (json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode())


def write_bytes(path: Path, data: bytes) -> None:
    """All of it or nothing, and on the disk before it has its name."""
    partial = path.with_name(path.name + PARTIAL)
    with writing_to(path):
        try:
            with partial.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, path)
        except OSError:
            partial.unlink(missing_ok=True)
            raise


@contextmanager
def writing_to(path: Path) -> Iterator[None]:
    """What the system says of a failed write, with the file and what to do."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        hint = "; finished shards are kept: make room and run the same command again" if full else ""
        raise ValueError(f"cannot write {path}: {error.strerror or error}{hint}") from error
