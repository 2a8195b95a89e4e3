"""From entries to rows of equal length on disk, and the order in which a run visits them.

Documents form one stream that is cut into rows. Chats stay whole: as many as fit share a row, the rest of it is padding. What
each token is for travels with it: padding, context (compared with the teacher only), or a token to learn from the data.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .entries import Entry, hub_name, read_entries
from .settings import Settings

IGNORED = -100
PADDING, CONTEXT, LEARN = 0, 1, 2
_OPEN_ROWS = 64  # rows that wait for a chat that still fits


class Piece(NamedTuple):
    """An entry as tokens, and what each is for."""

    ids: list[int]
    use: list[int]
    whole: bool  # a chat: not to be cut
    where: str


@dataclass(frozen=True)
class RowStore:
    """Rows of one source: token ids and uses, both [rows, sequence], read from disk as needed."""

    ids: NDArray[Any]
    use: NDArray[np.uint8]
    padded: bool = False  # somewhere

    def __len__(self) -> int:
        return len(self.ids)

    def row(self, index: int) -> dict[str, NDArray[Any]]:
        ids = self.ids[index].astype(np.int64)
        use = self.use[index]
        return {"input_ids": ids, "labels": np.where(use == LEARN, ids, IGNORED), "counted": use != PADDING}


class Encoder:
    """Turns entries into tokens with one tokenizer."""

    def __init__(self, tokenizer: Any, vocabulary: int, *, answers_only: bool = True) -> None:
        from ..corpus.tokens import end_of_document, first_token, tokenizer_digest

        self.tokenizer, self.vocabulary, self.answers_only = tokenizer, vocabulary, answers_only
        self.end = end_of_document(tokenizer)
        first = first_token(tokenizer)
        self.opening = [] if first == self.end else [first]
        self.digest = tokenizer_digest(tokenizer)

    def piece(self, entry: Entry) -> Piece:
        if entry.messages is not None:
            ids, use = self._chat(entry.messages, entry.where)
            return Piece(ids, use, True, entry.where)
        if entry.ids is not None:
            if entry.tokenizer not in (None, self.digest):
                raise ValueError(
                    f"{entry.where}: its ids were made by another tokenizer ({entry.tokenizer}) than the model's ({self.digest})"
                )
            ids = list(entry.ids)
        else:
            ids = self.opening + self._plain(entry.text or "")
        if ids[-1:] != [self.end]:
            ids.append(self.end)
        self._check(ids, entry.where)
        return Piece(ids, [LEARN] * len(ids), False, entry.where)

    def _plain(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def _check(self, ids: list[int], where: str) -> None:
        if ids and not 0 <= min(ids) <= max(ids) < self.vocabulary:
            bad = max(ids) if max(ids) >= self.vocabulary else min(ids)
            raise ValueError(f"{where}: token {bad} is outside the model's vocabulary of {self.vocabulary}")

    def _chat(self, messages: list[dict[str, str]], where: str) -> tuple[list[int], list[int]]:
        """The template's text, cut where answers begin and end: what the template writes up to an answer is context."""
        if not self.tokenizer.chat_template:
            raise ValueError(
                f"{where} is a chat, but this checkpoint has no chat template; give plain text, or a checkpoint with one"
            )
        ids: list[int] = []
        use: list[int] = []
        written = ""

        def take(text: str, mark: int) -> None:
            nonlocal written
            if not text.startswith(written):
                raise ValueError(
                    f"{where}: the chat template rewrites earlier turns as the chat goes on, so answers cannot be told apart"
                )
            fresh = self._plain(text[len(written) :])
            ids.extend(fresh)
            use.extend([mark] * len(fresh))
            written = text

        context = CONTEXT if self.answers_only else LEARN
        for index, message in enumerate(messages):
            if message["role"] == "assistant":
                take(self._render(messages[:index], True), context)
                take(self._render(messages[: index + 1], False), LEARN)
        take(self._render(messages, False), context)
        self._check(ids, where)
        return ids, use

    def _render(self, messages: list[dict[str, str]], prompt: bool) -> str:
        return str(self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt))


def pack(
    pieces: Iterator[Piece], sequence: int, padding: int, too_long: str = "error"
) -> Iterator[tuple[list[int], list[int]]]:
    """Rows of ``sequence`` tokens and their uses."""
    stream: tuple[list[int], list[int]] = ([], [])
    open_rows: list[tuple[list[int], list[int]]] = []

    def padded(row: tuple[list[int], list[int]]) -> tuple[list[int], list[int]]:
        missing = sequence - len(row[0])
        return row[0] + [padding] * missing, row[1] + [PADDING] * missing

    for piece in pieces:
        if piece.whole and len(piece.ids) > sequence:
            if too_long == "error":
                raise ValueError(
                    f"{piece.where}: a chat of {len(piece.ids)} tokens does not fit a row of {sequence}; use a longer --sequence, or "
                    f"--too-long drop or split"
                )
            if too_long == "drop":
                continue
        if piece.whole and len(piece.ids) <= sequence:
            fitting = [row for row in open_rows if len(row[0]) + len(piece.ids) <= sequence]
            if fitting:
                row = max(fitting, key=lambda row: len(row[0]))  # the fullest that takes it
            else:
                row = ([], [])
                open_rows.append(row)
            row[0].extend(piece.ids)
            row[1].extend(piece.use)
            if len(open_rows) > _OPEN_ROWS:
                fullest = max(range(len(open_rows)), key=lambda index: len(open_rows[index][0]))
                yield padded(open_rows.pop(fullest))
            continue
        stream[0].extend(piece.ids)
        stream[1].extend(piece.use)
        cut = len(stream[0]) // sequence * sequence
        for start in range(0, cut, sequence):
            yield stream[0][start : start + sequence], stream[1][start : start + sequence]
        stream = (stream[0][cut:], stream[1][cut:])
    for row in (*open_rows, stream):
        if len(row[0]) > 1:
            yield padded(row)


def build_rows(
    source: str,
    encoder: Encoder,
    sequence: int,
    folder: Path,
    *,
    too_long: str = "error",
    most: int | None = None,
    seed: int | None = None,
) -> RowStore:
    """The rows of ``source``, made once and kept in ``folder``; a second call finds them there.

    A hub dataset is read until it has given ``most`` rows, shuffled by ``seed``. A file is packed whole: it is all here, so a run
    of any length draws from all of it.
    """
    path = Path(source)
    if hub_name(source) is None:
        most = seed = None
    stamp = f"{path.stat().st_size} {path.stat().st_mtime_ns}" if path.is_file() else source
    facts = [source, stamp, encoder.digest, sequence, encoder.answers_only, too_long]
    if most is not None:
        facts += [most, seed]  # a longer run must not be fed the rows of a shorter one
    target = folder / hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]
    if not target.exists():
        folder.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=".rows-", dir=folder))
        try:
            rows = pack(read_pieces(source, encoder, seed), sequence, encoder.end, too_long)
            _write(islice(rows, most), scratch, sequence, source)
            scratch.rename(target)
        except BaseException:
            shutil.rmtree(scratch, ignore_errors=True)
            raise
    ids = np.memmap(target / "ids", dtype="<u4", mode="r").reshape(-1, sequence)
    use = np.memmap(target / "use", dtype=np.uint8, mode="r").reshape(-1, sequence)
    return RowStore(ids, use, (target / "padded").exists())


def read_pieces(source: str, encoder: Encoder, seed: int | None = None) -> Iterator[Piece]:
    if Path(source).is_dir():
        return _corpus_pieces(Path(source), encoder)
    return (encoder.piece(entry) for entry in read_entries(source, seed))


def _corpus_pieces(directory: Path, encoder: Encoder) -> Iterator[Piece]:
    from ..corpus.shards import Corpus

    corpus = Corpus.open(directory)
    made_by = corpus.tokenizer.get("digest")
    if made_by not in (None, encoder.digest):
        raise ValueError(f"{directory} was prepared with another tokenizer ({made_by}) than the model's ({encoder.digest})")
    for number in range(corpus.documents):
        ids = corpus.document(number).tolist()
        yield Piece(ids, [LEARN] * len(ids), False, f"{directory}, document {number}")


def _write(rows: Iterator[tuple[list[int], list[int]]], folder: Path, sequence: int, source: str) -> None:
    count = learned = padding = 0
    with (folder / "ids").open("wb") as ids_file, (folder / "use").open("wb") as use_file:
        for ids, use in rows:
            ids_file.write(np.asarray(ids, "<u4").tobytes())
            use_file.write(np.asarray(use, np.uint8).tobytes())
            count += 1
            learned += use.count(LEARN)
            padding += use.count(PADDING)
    if not count:
        raise ValueError(f"{source} is empty: it gives not even a row of 2 tokens")
    if not learned:
        raise ValueError(f"{source} has no token to learn from")
    if padding:
        (folder / "padded").touch()


class MixedRows:
    """Rows of several sources in the order of a run: shares by weight, shuffled by the seed alone. A torch map-style dataset."""

    def __init__(
        self, stores: Sequence[RowStore], weights: Sequence[float], *, rows: int | None, epochs: float = 1.0, seed: int = 0
    ) -> None:
        self.stores = list(stores)
        self.padded = any(store.padded for store in stores)
        rng = np.random.default_rng(seed)
        if rows is None:
            counts = [max(1, round(epochs * len(store))) for store in stores]
        else:
            counts = shares(weights, rows)
        chosen = [
            (source, _visits(len(store), count, rng)) for source, (store, count) in enumerate(zip(stores, counts, strict=True))
        ]
        flat = np.concatenate([np.stack([np.full(len(rows), source), rows], 1) for source, rows in chosen])
        self.order = flat[rng.permutation(len(flat))]
        self.counts = counts

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, index: int) -> dict[str, NDArray[Any]]:
        source, row = self.order[index]
        return self.stores[source].row(int(row))


def shares(weights: Sequence[float], rows: int) -> list[int]:
    """``rows`` divided by weight, rounded so that they add up."""
    borders = np.floor(np.cumsum([0.0, *weights]) / sum(weights) * rows + 0.5)
    return np.diff(borders).astype(int).tolist()


def _visits(available: int, count: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """``count`` rows: whole rounds through all of them, and a random part of one more."""
    rounds = [rng.permutation(available) for _ in range(-(-count // available))]
    return np.concatenate(rounds)[:count] if rounds else np.empty(0, np.int64)


def open_sources(settings: Settings, encoder: Encoder, folder: Path, tell: Callable[[str], None]) -> list[RowStore]:
    """The rows of each source: all, or as many of a hub dataset as the run visits."""
    limits: list[int | None] = [None] * len(settings.data)
    seed = None  # where all is read, the order in which it comes does not matter: rows are shuffled later (MixedRows)
    if settings.rows is not None:
        limits = [max(1, count) for count in shares([source.weight for source in settings.data], settings.rows)]
        seed = settings.seed
    stores = []
    for source, most in zip(settings.data, limits, strict=True):
        store = build_rows(source.path, encoder, settings.sequence, folder, too_long=settings.too_long, most=most, seed=seed)
        tell(f"data     {source.path}: {len(store):,} rows of {settings.sequence} tokens")
        stores.append(store)
    return stores


def collate(rows: list[dict[str, NDArray[Any]]], padded: bool = True) -> dict[str, Any]:
    """A batch; without padding anywhere the loss needs no mask. Always the same for a run: batches of one shape."""
    import torch

    names = ("input_ids", "labels", "counted") if padded else ("input_ids", "labels")
    return {name: torch.from_numpy(np.stack([row[name] for row in rows])) for name in names}
