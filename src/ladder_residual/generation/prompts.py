"""A file of prompts, and prompts in a model's chat template."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ..common.json_lines import json_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Messages = list[dict[str, str]]


def parse_prompts(path: Path) -> list[str] | list[Messages]:
    """One a line: plain text, or JSON objects with ``prompt`` or ``messages``. Needs no tokenizer, so it can be done first."""
    texts: list[str] = []
    chats: list[Messages] = []
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror or error}") from error
    for number, raw in enumerate(data.split(b"\n"), 1):  # not splitlines(): a JSON string may hold a U+2028
        try:
            line = raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{path}, line {number}: not UTF-8 text (byte {raw[error.start]:#04x}); if the file is Latin-1: "
                f"iconv -f latin1 -t utf-8 {path} > prompts-utf8{path.suffix}"
            ) from error
        if not line.strip():
            continue
        if path.suffix != ".jsonl":
            texts.append(line.removesuffix("\r"))
            continue
        row = json_line(path, number, line)
        if isinstance(row, dict) and isinstance(row.get("prompt"), str):
            texts.append(row["prompt"])
        elif isinstance(row, dict) and isinstance(row.get("messages"), list):
            if not all(
                isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str)
                for m in row["messages"]
            ):
                raise ValueError(f'{path}, line {number}: every message needs "role" and "content", both text')
            chats.append(row["messages"])
        else:
            raise ValueError(f'{path}, line {number}: expected an object with "prompt" (text) or "messages" (a list)')
    if texts and chats:
        raise ValueError(f'{path} mixes "prompt" and "messages" lines; use one kind per file')
    if not texts and not chats:
        raise ValueError(f"{path} holds no prompt: write one a line")
    return texts or chats


def as_text(
    prompts: list[str] | list[Messages], tokenizer: PreTrainedTokenizerBase, *, template: bool = False
) -> tuple[list[str], bool]:
    """Prompts ready for the tokenizer, and whether its chat template wrote them: it writes conversations, and with ``template`` also
    plain prompts, each as a user's message, if the tokenizer has one."""
    from .tokenizer import chat_prompt

    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    if texts and len(texts) < len(prompts):
        raise ValueError("some prompts are texts and others conversations: give one kind at a time")
    if texts and not (template and tokenizer.chat_template):
        return texts, False
    chats = [[{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt for prompt in prompts]
    return [chat_prompt(tokenizer, messages) for messages in chats], True
