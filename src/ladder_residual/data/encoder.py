"""Documents and chats to tokens, each token marked with its use: learned from, or context only."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from .corpus import Corpus
from .documents import Document, Messages, document_of
from .sources import SourceOptions, find_sources
from .tokenizer import end_of_document, first_token, plain_ids, render_chat, tokenizer_digest

PADDING, CONTEXT, LEARN = 0, 1, 2  # uses of a token; context is compared with a teacher, but not learned from the data
SEPARATOR = "<|endoftext|>"  # the line that ends a document of a text file


class Chunk(NamedTuple):
    """Tokens and their uses."""

    ids: list[int]
    use: list[int]
    whole: bool  # a chat: not to be split over rows
    place: str


class Encoder:
    """One tokenizer and the marks of its chat template."""

    def __init__(self, tokenizer: Any, vocabulary: int, *, answers_only: bool = True) -> None:
        self.tokenizer, self.vocabulary, self.answers_only = tokenizer, vocabulary, answers_only
        self.end = end_of_document(tokenizer)
        first = first_token(tokenizer)
        self.opening = [] if first == self.end else [first]
        self.digest = tokenizer_digest(tokenizer)

    def chunks(self, source: str, seed: int | None = None) -> Iterator[Chunk]:
        """All chunks of a file, a hub dataset (shuffled by ``seed``) or a corpus directory, in order."""
        if Path(source).is_dir():
            yield from self._corpus(Path(source))
            return
        for found in find_sources([source], SourceOptions(SEPARATOR, seed=seed)):
            for record in found.records():
                document = (
                    document_of(record.row, record.place) if record.first and record.last else Document(record.row["text"])
                )
                yield self.chunk(document, record.place, first=record.first, last=record.last)

    def _corpus(self, directory: Path) -> Iterator[Chunk]:
        corpus = Corpus.open(directory)
        made_by = corpus.tokenizer.get("digest")
        if made_by not in (None, self.digest):
            raise ValueError(f"{directory} was prepared with another tokenizer ({made_by}) than the model's ({self.digest})")
        for number in range(corpus.documents):
            ids = corpus.document(number).tolist()
            yield Chunk(ids, [LEARN] * len(ids), False, f"{directory}, document {number}")

    def chunk(self, document: Document, place: str, *, first: bool = True, last: bool = True) -> Chunk:
        """``first`` and ``last``: whether the text begins and ends its document."""
        if document.messages is not None:
            ids, use = self._chat(document.messages, place)
            return Chunk(ids, use, True, place)
        if document.ids is not None:
            if document.tokenizer not in (None, self.digest):
                raise ValueError(
                    f"{place}: its ids were made by another tokenizer ({document.tokenizer}) than the model's ({self.digest})"
                )
            ids = list(document.ids)
        else:
            ids = (self.opening if first else []) + plain_ids(self.tokenizer, document.text or "")
        if last and ids[-1:] != [self.end]:
            ids.append(self.end)
        self._check(ids, place)
        return Chunk(ids, [LEARN] * len(ids), False, place)

    def _check(self, ids: list[int], place: str) -> None:
        if ids and not 0 <= min(ids) <= max(ids) < self.vocabulary:
            bad = max(ids) if max(ids) >= self.vocabulary else min(ids)
            raise ValueError(f"{place}: token {bad} is outside the model's vocabulary of {self.vocabulary}")

    def _chat(self, messages: Messages, place: str) -> tuple[list[int], list[int]]:
        """The template's text, cut where answers begin and end: what the template writes up to an answer is context."""
        if not self.tokenizer.chat_template:
            raise ValueError(
                f"{place} is a chat, but this checkpoint has no chat template; give plain text, or a checkpoint with one"
            )
        if not any(message["role"] == "assistant" for message in messages):
            raise ValueError(f"{place}: a chat without an answer (role assistant) has nothing to learn from")
        ids: list[int] = []
        use: list[int] = []
        written = ""

        def take(text: str, mark: int) -> None:
            nonlocal written
            if not text.startswith(written):
                raise ValueError(
                    f"{place}: the chat template rewrites earlier turns as the chat goes on, so answers cannot be told apart"
                )
            fresh = plain_ids(self.tokenizer, text[len(written) :])
            ids.extend(fresh)
            use.extend([mark] * len(fresh))
            written = text

        context = CONTEXT if self.answers_only else LEARN
        for index, message in enumerate(messages):
            if message["role"] == "assistant":
                take(render_chat(self.tokenizer, messages[:index], prompt=True), context)
                take(render_chat(self.tokenizer, messages[: index + 1], prompt=False), LEARN)
        take(render_chat(self.tokenizer, messages, prompt=False), context)
        self._check(ids, place)
        return ids, use
