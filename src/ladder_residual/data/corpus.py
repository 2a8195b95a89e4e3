"""Tokens on disk: memory-mapped shards and an ``index.json`` that says what they are. No torch.

A shard is ``00000.tokens`` (token ids, little-endian) beside ``00000.documents`` (where each document ends, in tokens from the
shard's start). A document never crosses shards and ends with the end-of-document token. Read one after the other, the shards
are one stream of tokens: row and document positions count along it.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ..models.checkpoint_reader import INDEX_BYTES, read_json

INDEX = "index.json"
FORMAT = "ladder-corpus"
VERSION = 1
TOKEN_DTYPES: dict[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
ENDS_DTYPE = np.dtype("<u8")


def dtype_for(vocab_size: int) -> str:
    """The narrowest dtype that holds every id below ``vocab_size``."""
    for name, dtype in TOKEN_DTYPES.items():
        if vocab_size <= 1 << (8 * dtype.itemsize):
            return name
    raise ValueError(f"a vocabulary of {vocab_size} does not fit any token dtype ({', '.join(TOKEN_DTYPES)})")


@dataclass(frozen=True)
class Shard:
    name: str
    tokens: int
    documents: int
    sha256: str  # of NAME.tokens
    documents_sha256: str  # of NAME.documents

    @property
    def tokens_file(self) -> str:
        return f"{self.name}.tokens"

    @property
    def documents_file(self) -> str:
        return f"{self.name}.documents"


def read_shards(listed: Any, *more_numbers: Any) -> tuple[Shard, ...]:
    """What an index or a list of finished shards says. TypeError or ValueError if that cannot be."""
    shards = tuple(Shard(**shard) for shard in listed)
    numbers = [*more_numbers, *(number for shard in shards for number in (shard.tokens, shard.documents))]
    if not all(type(number) is int and 0 <= number < 1 << 62 for number in numbers):
        raise ValueError("numbers that are none")
    texts = [text for shard in shards for text in (shard.name, shard.sha256, shard.documents_sha256)]
    if not all(type(text) is str and re.fullmatch(r"\w{1,100}", text) for text in texts):
        raise ValueError("names or checksums of shards that are none")
    return shards


@dataclass(frozen=True)
class Corpus:
    """An opened directory of shards. Nothing is read until tokens are asked for."""

    directory: Path
    dtype: str
    vocab_size: int
    end_of_document: int
    shards: tuple[Shard, ...]
    tokenizer: dict[str, Any] = field(default_factory=dict)  # source and digest
    prepared: dict[str, Any] = field(default_factory=dict)  # sources and settings, as `ladder data prepare` recorded them

    @classmethod
    def open(cls, directory: str | Path, verify: Literal["sizes", "checksums"] = "sizes") -> Corpus:
        """``sizes`` looks at every file's size, ``checksums`` reads them all."""
        if verify not in ("sizes", "checksums"):
            raise ValueError(f"verify must be sizes or checksums, got {verify!r}")
        corpus = cls._from_index(Path(directory))
        corpus.check(checksums=verify == "checksums")
        return corpus

    @classmethod
    def _from_index(cls, directory: Path) -> Corpus:
        path = directory / INDEX
        if not path.exists():
            hint = "`ladder data prepare` has not finished there" if directory.is_dir() else "there is no such directory"
            raise ValueError(f"{directory} has no {INDEX}: {hint}")
        index = read_json(path, INDEX_BYTES)
        if index.get("format") != FORMAT:
            raise ValueError(f"{path} is not the index of a corpus of `ladder data prepare`")
        if index.get("version") != VERSION:
            raise ValueError(
                f"{path} has version {index.get('version')!r:.40}, this program reads version {VERSION}; prepare it again"
            )
        try:
            shards = read_shards(index["shards"], index["vocab_size"], index["end_of_document"])
            if not any(shard.documents for shard in shards):
                raise ValueError("no documents")
            if not all(type(index.get(key, {})) is dict for key in ("tokenizer", "prepared")):
                raise ValueError("tokenizer and prepared must be objects")
            corpus = cls(
                directory,
                index["dtype"],
                index["vocab_size"],
                index["end_of_document"],
                shards,
                index.get("tokenizer", {}),
                index.get("prepared", {}),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} is damaged: {type(error).__name__}: {error}") from error
        if type(corpus.dtype) is not str or corpus.dtype not in TOKEN_DTYPES:
            raise ValueError(f"{path}: unknown dtype {corpus.dtype!r:.40}; expected {' or '.join(TOKEN_DTYPES)}")
        if corpus.vocab_size > 1 << (8 * corpus._token_dtype.itemsize):
            raise ValueError(
                f"{path}: a vocabulary of {corpus.vocab_size} does not fit the shards' dtype {corpus.dtype} "
                f"(at most {1 << (8 * corpus._token_dtype.itemsize)}): prepare the corpus again with its tokenizer"
            )
        if corpus.end_of_document >= corpus.vocab_size:
            raise ValueError(f"{path}: the end-of-document token {corpus.end_of_document} is outside the vocabulary")
        return corpus

    def check(self, checksums: bool) -> None:
        for shard in self.shards:
            for name, count, dtype, sha256 in (
                (shard.tokens_file, shard.tokens, self._token_dtype, shard.sha256),
                (shard.documents_file, shard.documents, ENDS_DTYPE, shard.documents_sha256),
            ):
                path, size = self.directory / name, count * dtype.itemsize
                if not path.is_file():
                    raise ValueError(f"{path} is missing: the index lists it; copy it again or prepare the corpus again")
                if path.stat().st_size != size:
                    raise ValueError(f"{path} has {path.stat().st_size} bytes, the index says {size}: it was cut or replaced")
                if checksums and file_sha256(path) != sha256:
                    raise ValueError(f"{path} is damaged: its sha256 is not the one in the index; copy or prepare it again")

    @property
    def _token_dtype(self) -> np.dtype:
        return TOKEN_DTYPES[self.dtype]

    @property
    def tokens(self) -> int:
        return int(self._starts[-1])

    @property
    def documents(self) -> int:
        return sum(shard.documents for shard in self.shards)

    @cached_property
    def _starts(self) -> NDArray[np.int64]:
        """Where each shard begins in the stream, and at the end how long the stream is."""
        return np.cumsum([0] + [shard.tokens for shard in self.shards], dtype=np.int64)

    @cached_property
    def _maps(self) -> list[NDArray[Any]]:
        return [self._map(shard.tokens_file, self._token_dtype, shard.tokens) for shard in self.shards]

    def _map(self, name: str, dtype: np.dtype, count: int) -> NDArray[Any]:
        if count == 0:
            return np.empty(0, dtype)  # an empty file cannot be mapped
        return np.memmap(self.directory / name, dtype=dtype, mode="r", shape=(count,))

    @cached_property
    def document_ends(self) -> NDArray[np.int64]:
        """Where each document of the stream ends (exclusive), in order."""
        ends = []
        for shard, start in zip(self.shards, self._starts, strict=False):
            found = self._map(shard.documents_file, ENDS_DTYPE, shard.documents).astype(np.int64)
            if (np.diff(found, prepend=0) <= 0).any() or found[-1:].sum() != shard.tokens:
                raise ValueError(
                    f"{self.directory / shard.documents_file} is damaged: its documents do not add up; copy it again"
                )
            ends.append(found + start)
        return np.concatenate(ends)

    def read(self, start: int, stop: int) -> NDArray[np.int64]:
        """Tokens ``start`` to ``stop`` of the stream; the range may cross shards."""
        if not 0 <= start <= stop <= self.tokens:
            raise ValueError(f"tokens {start} to {stop} are outside the corpus of {self.tokens}")
        out = np.empty(stop - start, np.int64)
        number = int(np.searchsorted(self._starts, start, side="right")) - 1
        filled = 0
        while filled < len(out):
            first = start + filled - int(self._starts[number])
            part = self._maps[number][first : first + len(out) - filled]
            if (largest := int(part.max(initial=0))) >= self.vocab_size:
                where = self.directory / self.shards[number].tokens_file
                raise ValueError(
                    f"{where} is damaged: token {largest} is outside the vocabulary of {self.vocab_size}; copy it again"
                )
            out[filled : filled + len(part)] = part
            filled += len(part)
            number += 1
        return out

    def document(self, number: int) -> NDArray[np.int64]:
        """One document's tokens, its end-of-document token included."""
        ends = self.document_ends
        if not 0 <= number < len(ends):
            raise ValueError(f"document {number} is outside the corpus of {len(ends)} documents")
        return self.read(int(ends[number - 1]) if number else 0, int(ends[number]))

    def index(self) -> dict[str, Any]:
        """What ``index.json`` holds."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "dtype": self.dtype,
            "vocab_size": self.vocab_size,
            "end_of_document": self.end_of_document,
            "tokens": self.tokens,
            "documents": self.documents,
            "tokenizer": self.tokenizer,
            "prepared": self.prepared,
            "shards": [asdict(shard) for shard in self.shards],
        }

    def __getstate__(self) -> dict[str, Any]:
        # A mapped array would be pickled as a copy of the whole shard: a data worker opens its own maps instead.
        return {name: value for name, value in self.__dict__.items() if name not in ("_maps", "document_ends")}


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
