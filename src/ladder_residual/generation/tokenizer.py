"""A checkpoint's tokenizer, ready for batches of prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from ..data.failures import failures_of
from ..data.tokenizer import read_tokenizer, render_chat
from ..models.checkpoint_reader import resolve
from .request import NO_CHAT_TEMPLATE, check_tokenizer_files


def load_tokenizer(source: str | Path) -> PreTrainedTokenizerBase:
    source = resolve(source)
    check_tokenizer_files(source)
    tokenizer = read_tokenizer(source)
    limit = tokenizer.model_max_length
    if not isinstance(limit, int | float) or isinstance(limit, bool) or not limit > 0:
        raise ValueError(f"{source / 'tokenizer_config.json'}: model_max_length is {limit!r:.40}, expected a number of tokens")
    tokenizer.padding_side = "left"  # the last position of every row is where its next token comes from
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token_id is None:
            raise ValueError(f"the tokenizer of {source} has neither a pad nor an eos token; batches need one of them")
        tokenizer.pad_token_id = tokenizer.eos_token_id
    return tokenizer


def tokenize(tokenizer: PreTrainedTokenizerBase, prompts: list[str], **options: Any) -> Any:
    """ValueError for what the tokenizer cannot do; prompts are not repeated in it."""
    check_text(prompts)
    with failures_of("the tokenizer fails on the prompts"):
        return tokenizer(prompts, **options)


def chat_prompt(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]]) -> str:
    if not tokenizer.chat_template:
        raise ValueError(NO_CHAT_TEMPLATE)
    return render_chat(tokenizer, messages, prompt=True)


def check_text(prompts: list[str]) -> None:
    """A command line may hand over bytes that are no text; tokenizers answer that with riddles."""
    for prompt in prompts:
        try:
            prompt.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ValueError(f"a prompt is not valid text: character {error.start} cannot be written in UTF-8") from error
