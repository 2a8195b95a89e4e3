"""Chunks of tokens packed into rows of equal length on disk, and the order in which a run visits them.

Documents form one stream that is cut into rows. Chats stay whole: as many as fit share a row, the rest of it is padding. The use
of each token is stored beside it (``encoder.py``).
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from .corpus_rows import IGNORE_INDEX
from .encoder import LEARN, PADDING, Chunk, Encoder
from .sources import is_hub_dataset

_OPEN_ROWS = 64  # rows that wait for a chat that still fits


@dataclass(frozen=True)
class RowStore:
    """Rows of one source: token ids and uses, both [rows, sequence], read from disk as needed."""

    ids: NDArray[Any]
    use: NDArray[np.uint8]
    padded: bool = False  # somewhere
    picked: NDArray[np.int64] | None = None  # which rows of the arrays belong to it; None: all

    def __len__(self) -> int:
        return len(self.ids if self.picked is None else self.picked)

    def split(self, count: int) -> tuple[RowStore, RowStore]:
        """(the others, ``count`` rows evenly apart), both still on disk."""
        rows = np.arange(len(self.ids)) if self.picked is None else self.picked
        chosen = ((np.arange(count) + 0.5) * len(rows) / count).astype(np.int64)
        return replace(self, picked=np.delete(rows, chosen)), replace(self, picked=rows[chosen])

    def row(self, index: int) -> dict[str, NDArray[Any]]:
        index = index if self.picked is None else int(self.picked[index])
        ids = self.ids[index].astype(np.int64)
        use = self.use[index]
        return {"input_ids": ids, "labels": np.where(use == LEARN, ids, IGNORE_INDEX), "counted": use != PADDING}


def pack(
    chunks: Iterator[Chunk], sequence: int, padding: int, too_long: str = "error"
) -> Iterator[tuple[list[int], list[int]]]:
    """Rows of ``sequence`` tokens and their uses."""
    stream: tuple[list[int], list[int]] = ([], [])
    open_rows: list[tuple[list[int], list[int]]] = []

    def padded(row: tuple[list[int], list[int]]) -> tuple[list[int], list[int]]:
        missing = sequence - len(row[0])
        return row[0] + [padding] * missing, row[1] + [PADDING] * missing

    for chunk in chunks:
        if chunk.whole and len(chunk.ids) > sequence:
            if too_long == "error":
                raise ValueError(
                    f"{chunk.place}: a chat of {len(chunk.ids)} tokens does not fit a row of {sequence}; use a longer --sequence, or "
                    f"--too-long drop or split"
                )
            if too_long == "drop":
                continue
        if chunk.whole and len(chunk.ids) <= sequence:
            fitting = [row for row in open_rows if len(row[0]) + len(chunk.ids) <= sequence]
            if fitting:
                row = max(fitting, key=lambda row: len(row[0]))  # the fullest that takes it
            else:
                row = ([], [])
                open_rows.append(row)
            row[0].extend(chunk.ids)
            row[1].extend(chunk.use)
            if len(open_rows) > _OPEN_ROWS:
                fullest = max(range(len(open_rows)), key=lambda index: len(open_rows[index][0]))
                yield padded(open_rows.pop(fullest))
            continue
        stream[0].extend(chunk.ids)
        stream[1].extend(chunk.use)
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
    limit: int | None = None,
    seed: int | None = None,
) -> RowStore:
    """The rows of ``source``, made once and kept in ``folder``; a second call finds them there.

    A hub dataset is read until it has given ``limit`` rows, shuffled by ``seed``. A file is packed whole: it is all here, so a run
    of any length draws from all of it.
    """
    path = Path(source)
    if limit is None or not is_hub_dataset(source):
        limit = seed = None
    stamp = f"{path.stat().st_size} {path.stat().st_mtime_ns}" if path.is_file() else source
    key = [source, stamp, encoder.digest, sequence, encoder.answers_only, too_long]
    if limit is not None:
        key += [limit, seed]  # a longer run must not be fed the rows of a shorter one
    target = folder / hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]
    if not target.exists():
        folder.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=".rows-", dir=folder))
        try:
            rows = pack(encoder.chunks(source, seed), sequence, encoder.end, too_long)
            _write(islice(rows, limit), scratch, source)
            scratch.rename(target)
        except BaseException:
            shutil.rmtree(scratch, ignore_errors=True)
            raise
    return _open(target, sequence, encoder.vocabulary)


def _open(folder: Path, sequence: int, vocabulary: int) -> RowStore:
    """Rows that were written before. They lie beside a run's checkpoints, so they may be damaged, or somebody else's."""
    try:
        ids = np.memmap(folder / "ids", dtype="<u4", mode="r").reshape(-1, sequence)
        use = np.memmap(folder / "use", dtype=np.uint8, mode="r").reshape(-1, sequence)
        whole = len(ids) == len(use) and int(ids.max()) < vocabulary
    except (OSError, ValueError):
        whole = False
    if not whole:
        raise ValueError(f"the rows in {folder} are damaged: delete that folder, and they are made again")
    return RowStore(ids, use, (folder / "padded").exists())


def build_mixture(
    sources: Sequence[str],
    weights: Sequence[float],
    encoder: Encoder,
    sequence: int,
    folder: Path,
    *,
    rows: int | None,
    too_long: str = "error",
    seed: int = 0,
) -> list[RowStore]:
    """The rows of each source: all, or as many of a hub dataset as a run of ``rows`` rows visits."""
    # Without a limit all is read, and shuffled later (MixedRows).
    limits = [None] * len(sources) if rows is None else [max(1, count) for count in shares(weights, rows)]
    return [
        build_rows(source, encoder, sequence, folder, too_long=too_long, limit=limit, seed=seed)
        for source, limit in zip(sources, limits, strict=True)
    ]


def _write(rows: Iterator[tuple[list[int], list[int]]], folder: Path, source: str) -> None:
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
        counts = shares(weights, rows) if rows is not None else [max(1, round(epochs * len(store))) for store in stores]
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


def collate(rows: list[dict[str, NDArray[Any]]], padded: bool = True) -> dict[str, Any]:
    """A batch; without padding anywhere the loss needs no mask. Always the same for a run: batches of one shape."""
    names = ("input_ids", "labels", "counted") if padded else ("input_ids", "labels")
    return {name: torch.from_numpy(np.stack([row[name] for row in rows])) for name in names}
