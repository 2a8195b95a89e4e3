"""Facts about a tokenizer that text on disk and sampling need: which token ends a document, which begins one, how a chat is
written down, and a digest by which two tokenizers are told apart."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from ..models.checkpoint_reader import TOKENIZER_CONFIG_BYTES, read_json, resolve
from .failures import failures_of

# What pretraining text was joined with. An instruction-tuned tokenizer's own "eos" ends a turn, not a document.
_END_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>")
_MARK = "\u27eauser\u27eb"  # stands for the user's words in a template; no template contains it


def read_tokenizer(source: str | Path) -> PreTrainedTokenizerBase:
    """From a ``tokenizer.json``, a directory that holds a tokenizer, or a hub id."""
    path = Path(source)
    if path.is_file():
        with failures_of(f"{source} has no tokenizer transformers can load"):
            return PreTrainedTokenizerFast(tokenizer_file=str(path))
    directory = resolve(source, weights=False)
    if (config := directory / "tokenizer_config.json").exists():
        read_json(config, TOKENIZER_CONFIG_BYTES)
    with failures_of(f"{directory} has no tokenizer transformers can load"):
        tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
        special = tokenizer.special_tokens_map, tokenizer.all_special_ids, tokenizer.get_vocab()  # each may fail when asked for
    if not special[-1]:
        raise ValueError(f"the tokenizer of {directory} has no tokens")
    return tokenizer


def render_chat(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]], *, prompt: bool) -> str:
    """The chat as its template writes it; ``prompt``: up to where the next answer begins."""
    file = Path(tokenizer.name_or_path, "chat_template.jinja")
    with failures_of(f"the chat template in {file if file.exists() else file.with_name('tokenizer_config.json')} fails"):
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt))


def vocabulary_size(tokenizer: PreTrainedTokenizerBase) -> int:
    """One more than the largest id. ``len(tokenizer)`` is less where ids have gaps."""
    return max(tokenizer.get_vocab().values()) + 1


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """Equal for tokenizers whose ids mean the same, however they were stored."""
    vocabulary = json.dumps(sorted(tokenizer.get_vocab().items()), ensure_ascii=True)
    return hashlib.sha256(vocabulary.encode()).hexdigest()[:16]


def end_of_document(tokenizer: PreTrainedTokenizerBase, token: str | None = None) -> int:
    """The token that separates documents: the one asked for, the one pretraining used, or the tokenizer's eos."""
    vocabulary = tokenizer.get_vocab()
    if token is not None and token not in vocabulary:
        raise ValueError(f"the tokenizer has no token {token!r}")
    if token is not None:
        return vocabulary[token]
    for name in (*_END_OF_TEXT, tokenizer.eos_token, "</s>", "<eos>"):
        if name is not None and name in vocabulary:
            return vocabulary[name]
    raise ValueError("the tokenizer names no end-of-text token; say which one ends a document with --end-of-document TOKEN")


def first_token(tokenizer: PreTrainedTokenizerBase) -> int:
    """What a plain document begins with: the token the tokenizer puts there itself, else the one that ended the last document."""
    with failures_of("the tokenizer fails on an empty text"):
        alone = tokenizer("", add_special_tokens=True)["input_ids"]
    return alone[0] if alone else end_of_document(tokenizer)


@dataclass(frozen=True)
class ChatForm:
    """A chat template around one exchange, as tokens: ``header`` user's words ``end_of_turn`` ``answer_header`` answer."""

    header: tuple[int, ...]
    end_of_turn: int
    answer_header: tuple[int, ...]

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> ChatForm:
        if not tokenizer.chat_template:
            raise ValueError("this checkpoint has no chat template; use --start plain")
        text = render_chat(tokenizer, [{"role": "user", "content": _MARK}], prompt=True)
        header, mark, rest = text.partition(_MARK)
        if not mark:
            raise ValueError("the chat template does not show the user's words; use --start plain")
        after = plain_ids(tokenizer, rest)
        if not after or after[0] not in tokenizer.all_special_ids:
            raise ValueError(
                f"the chat template ends a user's turn with {rest[:20]!r}, which is no special token, so a model cannot be seen "
                "to stop there; use --start plain"
            )
        return cls(tuple(plain_ids(tokenizer, header)), after[0], tuple(after[1:]))


def plain_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Of a text to which nothing is added."""
    if not text:
        return []
    with failures_of("the tokenizer fails on a text"):
        return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]  # rows are cut later: no warning


def stop_tokens(tokenizer: PreTrainedTokenizerBase, generation_config: Any) -> set[int]:
    """Where a sample is over: whatever the checkpoint stops at, and the end of a document."""
    named = getattr(generation_config, "eos_token_id", None)
    stops = set(named) if isinstance(named, list) else {named}
    return {token for token in stops | {tokenizer.eos_token_id, end_of_document(tokenizer)} if token is not None}


@dataclass(frozen=True)
class TextToIds:
    """How a document becomes tokens: the tokenizer without its special tokens, as a string that another process can load, and
    what it puts before a text. What it puts after one gives way to the end-of-document token."""

    serialized: str
    before: NDArray[np.int64]

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> TextToIds:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise ValueError("the tokenizer has no tokenizer.json (a fast tokenizer); convert it with transformers first")
        backend = type(backend).from_str(backend.to_str())
        backend.no_truncation()  # some tokenizer.json files carry a limit of their own: documents would lose their ends
        backend.no_padding()
        with failures_of("the tokenizer fails on a text"):
            bare = backend.encode("a", add_special_tokens=False).ids
            full = backend.encode("a", add_special_tokens=True).ids
        start = next((at for at in range(len(full)) if full[at : at + len(bare)] == bare), 0)
        return cls(backend.to_str(), np.array(full[:start], np.int64))
