"""Where text comes from: text files, JSON lines, parquet, and datasets of the hub (streamed). No torch.

Every source yields records in a fixed order, each with its place, so that an error can name it. A long text comes in chunks that
end at line ends, so that neither memory nor one tokenizer call holds a whole file.
"""

from __future__ import annotations

import bz2
import gzip
import hashlib
import io
import lzma
import re
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

from ..common.json_lines import json_line

MAX_CHUNK = 1 << 18  # characters of text in one record
_COMPRESSED: dict[str, Callable[..., Any]] = {".xz": lzma.open, ".gz": gzip.open, ".bz2": bz2.open}
_TEXT, _LINES, _PARQUET = (".txt", ".text", ".md", ".raw"), (".jsonl", ".ndjson", ".json"), (".parquet",)
_KNOWN = ", ".join(_TEXT + _LINES + _PARQUET)
_HUB = "hub:"
_HUB_NAME = re.compile(r"(?P<path>([\w.-]+/)?[\w.-]+)(@(?P<revision>[\w./-]+))?(:(?P<subset>[\w.-]+))?")
_SHUFFLE_BUFFER = 1000  # records of a hub dataset held at a time to draw the next from


class Record(NamedTuple):
    """One document, or a chunk of one."""

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
    seed: int | None = None  # shuffles a hub dataset, so that a reader that stops early sees more than its first file


def is_hub_dataset(name: str) -> bool:
    """Whether ``name`` is a dataset of the hub and neither is nor looks like a file."""
    path = Path(name)
    owned = "/" in name and _HUB_NAME.fullmatch(name)
    return name.startswith(_HUB) or bool(owned and not path.exists() and not _kind(path))


def find_sources(names: list[str], options: SourceOptions) -> list[Source]:
    """A source per file. A directory stands for the files in it, in the order of their names."""
    found: list[Source] = []
    for name in names:
        path = Path(name)
        if is_hub_dataset(name):
            found.append(_dataset(name, options))
        elif path.is_dir():
            files = sorted(file for file in path.rglob("[!.]*") if file.is_file() and _kind(file) and file.suffix != ".json")
            if not files:
                raise ValueError(f"the directory {name} holds no {_KNOWN} file")
            found += [_file(str(file), file, options) for file in files]
        elif path.exists():
            found.append(_file(name, path, options))
        else:
            raise ValueError(
                f"there is no file or directory {name}; a dataset of the hub is written OWNER/NAME, OWNER/NAME:SUBSET or hub:NAME"
            )
    return found


def _kind(path: Path) -> str | None:
    suffixes = [suffix.lower() for suffix in path.suffixes if suffix.lower() not in _COMPRESSED]
    last = suffixes[-1] if suffixes else ""
    return "text" if last in _TEXT else "lines" if last in _LINES else "parquet" if last in _PARQUET else None


def _file(name: str, path: Path, options: SourceOptions) -> Source:
    kind = _kind(path)
    if kind is None:
        raise ValueError(
            f"{name}: cannot tell what kind of file this is; known are {_KNOWN}; text and JSON lines also with .xz, .gz or .bz2"
        )
    with _reading(name), path.open("rb") as file:
        size = path.stat().st_size
        ends = file.read(1 << 16)
        file.seek(max(0, size - (1 << 16)))
        identity = {"name": name, "bytes": size, "ends": hashlib.sha256(ends + file.read()).hexdigest()[:16]}
    opened: list[IO[bytes]] = []  # the file on disk; its position is the progress

    def records() -> Iterator[Record]:
        with _reading(name), path.open("rb") as raw:
            opened[:] = [raw]
            if kind == "parquet":
                yield from _parquet(name, raw)
                return
            unpacked = _COMPRESSED.get(path.suffix.lower(), lambda file: file)(raw)
            # No universal newlines: the model reads what is in the file.
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
    except (lzma.LZMAError, EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{name} is damaged or cut short: {error}") from error
    except OSError as error:
        raise ValueError(f"cannot read {name}: {error.strerror or error}") from error


def _text(name: str, lines: IO[str], separator: str | None) -> Iterator[Record]:
    """Documents that a ``separator`` line ends; those without any text are left out."""
    document, first, length = 1, True, 0
    kept: list[str] = []
    for line in lines:
        ends = separator is not None and line.rstrip("\r\n") == separator
        if ends or (length + len(line) > MAX_CHUNK and kept):
            text = "".join(kept)
            if not (ends and first) or text.strip():
                # The line break before the separator belongs to it.
                yield Record(f"{name}, document {document}", {"text": text.removesuffix("\n") if ends else text}, first, ends)
            document, first, kept, length = document + ends, ends, [], 0
        if not ends:
            kept.append(line)
            length += len(line)
    if not first or "".join(kept).strip():
        yield Record(f"{name}, document {document}", {"text": "".join(kept)}, first)


def kind_and_size(value: Any) -> str:
    """For errors, which do not repeat the texts they are about."""
    return f"a {type(value).__name__} of {len(str(value))} characters"


def _json_lines(name: str, lines: IO[str]) -> Iterator[Record]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        row = json_line(name, number, line)
        if not isinstance(row, dict):
            raise ValueError(f"{name}, line {number}: expected an object, got {kind_and_size(row)}")
        yield Record(f"{name}, line {number}", row)


def _parquet(name: str, raw: IO[bytes]) -> Iterator[Record]:
    try:
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise ValueError("parquet files need pyarrow: pip install 'ladder-residual[train]'") from error
    number = 0
    try:
        for batch in ParquetFile(raw).iter_batches(batch_size=1024):
            for row in batch.to_pylist():
                number += 1
                yield Record(f"{name}, row {number}", row)
    except MemoryError:
        raise
    except Exception as error:  # pyarrow's own kinds, and whatever its conversions to Python raise
        raise ValueError(f"{name} is damaged: {type(error).__name__}: {str(error)[:300]}") from error


def _dataset(name: str, options: SourceOptions) -> Source:
    """A dataset of the hub, or (``hub:``) anything else ``datasets`` can load, read as it arrives."""
    found = _HUB_NAME.fullmatch(name.removeprefix(_HUB))
    path, revision = (found["path"], found["revision"]) if found else (name.removeprefix(_HUB), None)
    subset = options.subset or (found["subset"] if found else None)

    def records() -> Iterator[Record]:
        try:
            import datasets
        except ImportError as error:
            raise ValueError("datasets of the hub need the datasets package: pip install 'ladder-residual[train]'") from error
        try:
            rows = datasets.load_dataset(path, subset, split=options.split, revision=revision, streaming=True)
        except Exception as error:  # the package raises many unrelated kinds: not found, no such split, gated, no network
            raise ValueError(
                f"{name} is no file, and it cannot be read from the hub: {type(error).__name__}: {str(error)[:300]}"
            ) from error
        where, number = name, 0
        if options.seed is not None:
            rows = rows.shuffle(seed=options.seed, buffer_size=_SHUFFLE_BUFFER)
            where = f"{name} (shuffled by seed {options.seed})"
        try:
            for number, row in enumerate(rows, 1):
                yield Record(f"{where}, row {number}", row)
        except Exception as error:
            raise ValueError(f"{where}: cannot read row {number + 1}: {type(error).__name__}: {str(error)[:300]}") from error

    return Source(name, {"name": name, "split": options.split, "subset": subset}, records)
