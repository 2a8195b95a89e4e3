"""What to score and what came of it, as files: tokens go to the machine with the model, log-probabilities come back.

A request asks for the log-probability of a continuation after a context, both as token ids. Its key is a digest of them, so
scores find their requests again whatever the order. No torch here.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import math
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from ..common.json_lines import json_line

REQUESTS_FORMAT = "ladder-residual requests 1"
SCORES_FORMAT = "ladder-residual scores 1"


class Request(NamedTuple):
    context: Sequence[int]
    continuation: Sequence[int]

    @property
    def key(self) -> str:
        text = json.dumps([list(self.context), list(self.continuation)], separators=(",", ":"))
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


class Score(NamedTuple):
    logprob: float  # nats, of the whole continuation
    greedy: bool  # whether greedy decoding would have written it


@dataclass(frozen=True)
class Requests:
    """Groups of requests, each scored in one go: what shares a batch is part of the result's last digits."""

    groups: dict[str, list[Request]]
    about: dict[str, Any] = field(default_factory=dict)  # tasks, shots, limit, tokenizer: for people

    def __len__(self) -> int:
        return sum(map(len, self.groups.values()))

    def save(self, path: str | Path) -> None:
        header = {"format": REQUESTS_FORMAT, "groups": {name: len(group) for name, group in self.groups.items()}, **self.about}
        # No time in the file: the same requests make the same bytes.
        with Path(path).open("wb") as file, gzip.GzipFile("", "wb", mtime=0, fileobj=file) as packed:
            packed.write((json.dumps(header) + "\n").encode())
            for group in self.groups.values():
                for request in group:
                    row = [list(request.context), list(request.continuation)]
                    packed.write((json.dumps(row, separators=(",", ":")) + "\n").encode())

    @classmethod
    def load(cls, path: str | Path) -> Requests:
        try:
            with gzip.open(path, "rt", encoding="utf-8") as file:
                lines = file.read().splitlines()
        except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
            raise ValueError(f"cannot read the requests in {path}: {error}") from error
        header = json_line(path, 1, lines[0] if lines else "")
        known = isinstance(header, dict) and header.pop("format", None) == REQUESTS_FORMAT
        sizes = header.pop("groups", None) if known else None
        if not isinstance(sizes, dict) or not all(type(size) is int and size >= 0 for size in sizes.values()):
            raise ValueError(f"{path} is no requests file; `ladder eval ... --requests-out FILE` writes one")
        requests = [_request(path, number, line) for number, line in enumerate(lines[1:], 2)]
        if sum(sizes.values()) != len(requests):
            raise ValueError(f"{path} announces {sum(sizes.values())} requests and holds {len(requests)}; it was cut short")
        rest = iter(requests)
        return cls({name: list(islice(rest, size)) for name, size in sizes.items()}, header)


def _request(path: str | Path, number: int, line: str) -> Request:
    row = json_line(path, number, line)
    good = isinstance(row, list) and len(row) == 2 and all(isinstance(part, list) and part for part in row)
    if not good or not all(type(token) is int and token >= 0 for part in row for token in part):
        raise ValueError(f"{path}, line {number}: expected [[context ids], [continuation ids]], neither empty")
    return Request(*row)


@dataclass(frozen=True)
class Scores:
    """Scores by request key, and what they were made with."""

    by_key: dict[str, Score]
    about: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, requests: Iterable[Request], scores: Iterable[Score], about: dict[str, Any] | None = None) -> Scores:
        return cls({request.key: score for request, score in zip(requests, scores, strict=True)}, about or {})

    def __getitem__(self, request: Request) -> Score:
        try:
            return self.by_key[request.key]
        except KeyError:
            raise ValueError(
                "a request of these tasks has no score: the scores were made from other tasks, shots, rows, files or another "
                "tokenizer; write the requests again with --requests-out and score those"
            ) from None

    def save(self, path: str | Path) -> None:
        scores = {key: [score.logprob, int(score.greedy)] for key, score in self.by_key.items()}
        Path(path).write_text(json.dumps({"format": SCORES_FORMAT, **self.about, "scores": scores}) + "\n", encoding="utf-8")


def load_scores(path: str | Path) -> dict[str, Scores]:
    """One file of scores, or several models' in one (``{name: scores}``, as a run over many models gathers them)."""
    try:
        data = Path(path).read_bytes()
        document = json.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"cannot read the scores in {path}: {error}") from error
    except (ValueError, RecursionError) as error:
        raise _no_scores(path, error) from error
    if not isinstance(document, dict) or not document or "format" in document:
        return {"": _scores(path, document)}
    return {str(name): _scores(f"{path}, {name}", part) for name, part in document.items()}


def _scores(where: str | Path, document: Any) -> Scores:
    try:
        about = dict(document)
        if about.pop("format") != SCORES_FORMAT:
            raise KeyError("format")
        scores = {key: Score(float(logprob), bool(greedy)) for key, (logprob, greedy) in about.pop("scores").items()}
        if not all(math.isfinite(score.logprob) for score in scores.values()):
            raise ValueError("a score is NaN or infinite")
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise _no_scores(where, error) from error
    return Scores(scores, about)


def _no_scores(where: str | Path, error: Exception) -> ValueError:
    reason = f"{type(error).__name__}: {error}"
    return ValueError(f"{where} is no scores file; `python -m ladder_residual.evaluate.score` writes one ({reason:.200})")
