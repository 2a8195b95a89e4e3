"""Where documents come from: text files, JSON lines, parquet, and datasets of the hub (streamed). No torch.

Every source yields records in a fixed order, each with its place, so that what is wrong with one can be named. A long text
comes in pieces, cut at line ends, so that neither memory nor one tokenizer has to hold a whole book case.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import lzma
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

PIECE = 1 << 18  # characters
_COMPRESSED: dict[str, Callable[..., Any]] = {".xz": lzma.open, ".gz": gzip.open}
_TEXT, _LINES, _PARQUET = (".txt", ".text", ".md", ".raw"), (".jsonl", ".ndjson"), (".parquet",)
_HUB = "hub:"
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(@[\w./-]+)?")


class Record(NamedTuple):
    """One document, or a piece of one."""

    place: str  # "rows.jsonl, line 3"
    row: dict[str, Any]
    first: bool = True  # the document begins here
    last: bool = True  # and ends here


@dataclass(frozen=True)
class Source:
    name: str  # as the user wrote it
    identity: dict[str, Any]  # what a resumed run must find unchanged
    records: Callable[[], Iterator[Record]]
    size: int | None = None  # bytes, where that is known
    position: Callable[[], int] = lambda: 0  # bytes read so far


@dataclass(frozen=True)
class SourceOptions:
    document_separator: str | None = None  # a line of a text file that is this ends a document
    split: str = "train"  # of a hub dataset
    subset: str | None = None


def find_sources(names: list[str], options: SourceOptions) -> list[Source]:
    """A source per file. A directory stands for the files in it, in the order of their names."""
    found: list[Source] = []
    for name in names:
        path = Path(name)
        if name.startswith(_HUB):
            found.append(_dataset(name, name.removeprefix(_HUB), options))
        elif path.is_dir():
            files = sorted(file for file in path.rglob("*") if file.is_file() and _kind(file) and not file.name.startswith("."))
            if not files:
                raise ValueError(f"the directory {name} holds no {', '.join(_TEXT + _LINES + _PARQUET)} file")
            found += [_file(str(file), file, options) for file in files]
        elif path.exists():
            found.append(_file(name, path, options))
        elif _HUB_ID.fullmatch(name) and not _kind(path):
            found.append(_dataset(name, name, options))
        else:
            raise ValueError(f"there is no file or directory {name}; a dataset of the hub is written OWNER/NAME or hub:NAME")
    return found


def _kind(path: Path) -> str | None:
    suffixes = [suffix.lower() for suffix in path.suffixes if suffix.lower() not in _COMPRESSED]
    last = suffixes[-1] if suffixes else ""
    return "text" if last in _TEXT else "lines" if last in _LINES else "parquet" if last in _PARQUET else None


def _file(name: str, path: Path, options: SourceOptions) -> Source:
    kind = _kind(path)
    if kind is None:
        known = ", ".join(_TEXT + _LINES + _PARQUET)
        raise ValueError(
            f"{name}: cannot tell what kind of file this is; known are {known}, the first two kinds also with .xz or .gz"
        )
    with _reading(name), path.open("rb") as file:
        size = path.stat().st_size
        ends = file.read(1 << 16)
        file.seek(max(0, size - (1 << 16)))
        identity = {"name": name, "bytes": size, "ends": hashlib.sha256(ends + file.read()).hexdigest()[:16]}
    opened: list[IO[bytes]] = []  # the file on disk, whose position is how far we are; the last one counts

    def records() -> Iterator[Record]:
        with _reading(name), path.open("rb") as raw:
            opened[:] = [raw]
            if kind == "parquet":
                yield from _parquet(name, raw)
                return
            # Not universal newlines: what is in the file is what the model reads.
            unpacked = _COMPRESSED.get(path.suffix.lower(), lambda file: file)(raw)
            with io.TextIOWrapper(unpacked, encoding="utf-8-sig", newline="\n") as lines:
                yield from _text(name, lines, options.document_separator) if kind == "text" else _json_lines(name, lines)

    def position() -> int:
        return opened[0].tell() if opened and not opened[0].closed else size if opened else 0

    return Source(name, identity, records, size, position)


@contextmanager
def _reading(name: str) -> Iterator[None]:
    try:
        yield
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} is not UTF-8 text: {error.reason} at byte {error.start} of a block") from error
    except (lzma.LZMAError, EOFError, gzip.BadGzipFile) as error:
        raise ValueError(f"{name} is damaged: {error}") from error
    except OSError as error:
        raise ValueError(f"cannot read {name}: {error.strerror or error}") from error


def _text(name: str, lines: IO[str], separator: str | None) -> Iterator[Record]:
    number, first, length = 1, True, 0
    kept: list[str] = []
    for line in lines:
        ends = separator is not None and line.rstrip("\r\n") == separator
        if ends or (length + len(line) > PIECE and kept):
            text = "".join(kept)
            # The line break before the separator belongs to it.
            yield Record(f"{name}, document {number}", {"text": text.removesuffix("\n") if ends else text}, first, ends)
            number, first, kept, length = number + ends, ends, [], 0
        if not ends:
            kept.append(line)
            length += len(line)
    if kept or not first:
        yield Record(f"{name}, document {number}", {"text": "".join(kept)}, first)


def kind_and_size(value: Any) -> str:
    """For errors, which do not repeat the texts they are about."""
    return f"a {type(value).__name__} of {len(str(value))} characters"


def _json_lines(name: str, lines: IO[str]) -> Iterator[Record]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{name}, line {number}: not JSON: {error}") from error
        if not isinstance(row, dict):
            raise ValueError(f"{name}, line {number}: expected an object, got {kind_and_size(row)}")
        yield Record(f"{name}, line {number}", row)


def _parquet(name: str, raw: IO[bytes]) -> Iterator[Record]:
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise ValueError("parquet files need pyarrow: pip install 'ladder-residual[train]'") from error
    number = 0
    try:
        for batch in ParquetFile(raw).iter_batches(batch_size=1024):
            for row in batch.to_pylist():
                number += 1
                yield Record(f"{name}, row {number}", row)
    except ArrowException as error:
        raise ValueError(f"{name} is damaged: {error}") from error


def _dataset(name: str, identifier: str, options: SourceOptions) -> Source:
    """A dataset of the hub, or anything else ``datasets`` can load, read as it arrives."""
    path, _, revision = identifier.partition("@")

    def records() -> Iterator[Record]:
        try:
            import datasets
        except ImportError as error:
            raise ValueError("datasets of the hub need the datasets package: pip install 'ladder-residual[train]'") from error
        try:
            rows = datasets.load_dataset(path, options.subset, split=options.split, revision=revision or None, streaming=True)
        except Exception as error:  # the package raises many unrelated kinds: not found, no such split, gated, no network
            raise ValueError(f"cannot load the dataset {name}: {str(error)[:300]}") from error
        for number, row in enumerate(rows, 1):
            yield Record(f"{name}, row {number}", row)

    return Source(name, {"name": name, "split": options.split, "subset": options.subset}, records)
