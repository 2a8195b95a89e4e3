"""Reading what to learn from: text files, JSON lines, hub datasets; each entry a document or a chat, with its place for messages.

    .txt            documents, separated by lines that say <|endoftext|>
    .jsonl          one object a line: text | ids | messages | conversations | prompt + completion | question + answer |
                    instruction (+ input) + output
    owner/name      a hub dataset with such columns, read as a stream (needs the `datasets` package); owner/name:subset
                    where it has several; only as much of it is read as is asked for

All of them may be compressed (.xz, .gz, .bz2).
"""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple

from ..corpus.sources import kind_and_size

END_OF_TEXT = "<|endoftext|>"
_OPENERS: dict[str, Any] = {".xz": lzma.open, ".gz": gzip.open, ".bz2": bz2.open}
_SUFFIXES = (".txt", ".jsonl", ".json", ".md", ".raw")
_SHUFFLED = 1000  # documents of a hub dataset held at a time to draw the next from: few enough that books fit in memory
_HUB_NAME = re.compile(r"([\w][\w.-]*/[\w][\w.-]*)(?::([\w.-]+))?")
_PAIRS = (("prompt", "completion"), ("question", "answer"), ("instruction", "output"), ("prompt", "response"))
_ROLES = {"human": "user", "gpt": "assistant", "user": "user", "assistant": "assistant", "system": "system"}
SHAPES = "text, ids, messages, conversations, or a pair such as prompt and completion"


class Entry(NamedTuple):
    """One document or chat; exactly one of the first three is set."""

    where: str
    text: str | None = None
    ids: list[int] | None = None
    messages: list[dict[str, str]] | None = None
    tokenizer: str | None = None  # digest of the tokenizer that made the ids


def hub_name(source: str) -> tuple[str, str | None] | None:
    """Name and subset of a hub dataset; None where ``source`` is, or looks like, a file."""
    path = Path(source)
    found = _HUB_NAME.fullmatch(source)
    if found is None or path.exists() or path.suffix in (*_SUFFIXES, *_OPENERS):
        return None
    return found[1], found[2]


def read_entries(source: str, seed: int | None = None) -> Iterator[Entry]:
    """The entries of a file or a hub dataset; ValueError names the line that is wrong. ``seed`` shuffles a hub dataset."""
    hub = hub_name(source)
    if hub is not None:
        yield from _hub_entries(source, *hub, seed)
        return
    path = Path(source)
    if not path.exists():
        raise ValueError(f"no data file at {source} (a hub dataset is written owner/name or owner/name:subset)")
    inner = path.with_suffix("") if path.suffix in _OPENERS else path
    if inner.suffix not in _SUFFIXES:
        raise ValueError(
            f"{source}: cannot tell what it holds from its name; use .txt or .jsonl, or either with .xz, .gz, .bz2"
        )
    try:
        with _OPENERS.get(path.suffix, open)(path, "rt", encoding="utf-8") as lines:
            yield from _json_entries(lines, source) if inner.suffix in (".jsonl", ".json") else _text_entries(lines, source)
    except UnicodeDecodeError as error:
        raise ValueError(f"{source} is no UTF-8 text: {error}") from error
    except (lzma.LZMAError, EOFError, gzip.BadGzipFile) as error:
        raise ValueError(f"{source} is damaged or cut short: {error}") from error


def _text_entries(lines: IO[str], source: str) -> Iterator[Entry]:
    document: list[str] = []
    first = 1
    for number, line in enumerate(lines, start=1):
        if line.strip() == END_OF_TEXT:
            if "".join(document).strip():
                yield Entry(f"{source}, line {first}", text="".join(document))
            document, first = [], number + 1
        else:
            document.append(line)
    if "".join(document).strip():
        yield Entry(f"{source}, line {first}", text="".join(document))


def _json_entries(lines: Iterable[str], source: str) -> Iterator[Entry]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{source}, line {number}"
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{where}: not JSON: {error}") from error
        if not isinstance(row, dict):
            raise ValueError(f"{where}: expected an object with {SHAPES}, got {type(row).__name__}")
        yield entry_of(row, where)


def _hub_entries(source: str, name: str, subset: str | None, seed: int | None) -> Iterator[Entry]:
    try:
        from datasets import load_dataset
    except ImportError:
        raise ValueError(
            f"{source} is no file; as a hub dataset it needs the datasets package: pip install 'ladder-residual[train]'"
        ) from None
    try:
        rows = load_dataset(name, subset, split="train", streaming=True)
    except Exception as error:  # the hub clients raise a dozen unrelated kinds for "not there", "no access" and "no network"
        raise ValueError(
            f"{source} is no file, and reading it from the hub failed: {type(error).__name__}: {error!s:.300}"
        ) from error
    if seed is not None:  # whoever stops early would otherwise know only the beginning of the first file
        rows = rows.shuffle(seed=seed, buffer_size=_SHUFFLED)
    where = source if seed is None else f"{source} (shuffled by seed {seed})"
    for number, row in enumerate(rows, start=1):
        yield entry_of(row, f"{where}, row {number}")


def entry_of(row: Mapping[str, Any], where: str) -> Entry:
    if isinstance(row.get("ids"), list):
        if not row["ids"] or not all(isinstance(token, int) and not isinstance(token, bool) for token in row["ids"]):
            raise ValueError(f"{where}: ids must be a list of token numbers, not empty")
        return Entry(where, ids=row["ids"], tokenizer=row.get("tokenizer"))
    for key in ("messages", "conversations"):
        if isinstance(row.get(key), list):
            return Entry(where, messages=_messages(row[key], where))
    for asked, answered in _PAIRS:
        if asked in row and answered in row:
            question = _string(row[asked], asked, where)
            if asked == "instruction" and row.get("input"):
                question += "\n\n" + _string(row["input"], "input", where)
            answer = _string(row[answered], answered, where)
            return Entry(where, messages=[{"role": "user", "content": question}, {"role": "assistant", "content": answer}])
    if "text" in row:
        return Entry(where, text=_string(row["text"], "text", where))
    raise ValueError(f"{where}: has none of {SHAPES}; its fields are {', '.join(map(str, row)) or 'none'}")


def _string(value: Any, name: str, where: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{where}: {name} must be text, not empty; got {kind_and_size(value)}")
    return value


def _messages(turns: list[Any], where: str) -> list[dict[str, str]]:
    messages = []
    for turn in turns:
        if not isinstance(turn, dict):
            raise ValueError(f"{where}: a message is an object with role and content, got {kind_and_size(turn)}")
        role, content = turn.get("role", turn.get("from")), turn.get("content", turn.get("value"))
        if role not in _ROLES:
            raise ValueError(f"{where}: unknown role {role!r:.40}; expected {', '.join(_ROLES)}")
        messages.append({"role": _ROLES[role], "content": _string(content, "content", where)})
    if not any(message["role"] == "assistant" for message in messages):
        raise ValueError(f"{where}: a chat without an answer (role assistant) has nothing to learn from")
    return messages
