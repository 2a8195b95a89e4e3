"""What a record holds: a text, token ids, or a chat. The same fields for every source and for every reader.

text | ids | messages | conversations | prompt + completion | prompt + response | question + answer |
instruction (+ input) + output
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from .sources import kind_and_size

_PAIRS = (("prompt", "completion"), ("question", "answer"), ("instruction", "output"), ("prompt", "response"))
_ROLES = {"human": "user", "gpt": "assistant"} | {role: role for role in ("user", "assistant", "system", "tool", "developer")}
_OTHERS = "ids, messages, conversations, or a pair such as prompt and completion"

Messages = list[dict[str, str]]


class Document(NamedTuple):
    """A document or a chat; exactly one of the first three is set."""

    text: str | None = None
    ids: list[int] | None = None
    messages: Messages | None = None
    tokenizer: str | None = None  # digest of the tokenizer that made the ids


def document_of(row: Mapping[str, Any], place: str, text_fields: tuple[str, ...] | None = None) -> Document:
    """``text_fields``: fields that hold the text, joined by line breaks; they win over every other field but ``ids``."""
    if isinstance(row.get("ids"), list):
        if not row["ids"] or not all(type(token) is int for token in row["ids"]):
            raise ValueError(f"{place}: ids must be a list of whole numbers, not empty")
        if wrong := next((token for token in row["ids"] if not 0 <= token < 1 << 32), None):
            raise ValueError(f"{place}: token {wrong!r:.30} is outside every vocabulary")
        return Document(ids=row["ids"], tokenizer=row.get("tokenizer"))
    if text_fields and all(name in row for name in text_fields):
        return Document(text="\n".join(_string(row[name], name, place, empty=True) for name in text_fields))
    for key in ("messages", "conversations"):
        if isinstance(row.get(key), list):
            return Document(messages=[_message(turn, place) for turn in row[key]])
    for asked, answered in _PAIRS:
        if asked in row and answered in row:
            question = _string(row[asked], asked, place)
            if asked == "instruction" and row.get("input"):
                question += "\n\n" + _string(row["input"], "input", place)
            answer = _string(row[answered], answered, place)
            return Document(messages=[{"role": "user", "content": question}, {"role": "assistant", "content": answer}])
    if "text" in row:
        return Document(text=_string(row["text"], "text", place))
    fields = ", ".join(str(name)[:40] for name in list(row)[:12]) or "none"
    hint = "; name the one to use with --text-field" if text_fields else ""
    raise ValueError(f"{place}: has none of {' and '.join(text_fields or ('text',))}, {_OTHERS}; its fields are {fields}{hint}")


def _string(value: Any, name: str, place: str, *, empty: bool = False) -> str:
    if not isinstance(value, str) or not (empty or value.strip()):
        raise ValueError(f"{place}: {name} must be text{'' if empty else ', not empty'}; got {kind_and_size(value)}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{place}: {name} is no text: character {error.start} is half of a surrogate pair") from None
    return value


def _message(turn: Any, place: str) -> dict[str, str]:
    if not isinstance(turn, Mapping):
        raise ValueError(f"{place}: a message is an object with role and content, got {kind_and_size(turn)}")
    role = turn.get("role", turn.get("from"))
    if not isinstance(role, str) or role not in _ROLES:
        raise ValueError(f"{place}: unknown role {role!r:.40}; expected {', '.join(_ROLES)}")
    return {"role": _ROLES[role], "content": _string(turn.get("content", turn.get("value")), "content", place)}
