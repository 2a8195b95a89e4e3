"""How good input is broken: bytes, JSON documents, text. Everything is drawn from the given source of chance, so it repeats."""

from __future__ import annotations

import copy
import json
import tomllib
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

NUMBERS = [0, -1, 1, 2, 7, 2**31, 2**63, -(2**63), 10**30, 0.5, -0.0, 1e308, 1e-320, float("nan"), float("inf"), float("-inf")]
WORDS = [
    "",
    " ",
    "\0",
    "..",
    "/",
    "../../etc/passwd",
    "/dev/zero",
    "nan",
    "None",
    "true",
    "é",
    "\u2028",
    "\ud800",
    "<s>",
    "</s>",
]
WORDS += ["<script>alert(1)</script>", "\x1b]0;title\x07", "${HOME}"]
WORDS += ["x" * 5000, "%s%n", "{{7*7}}", "$(id)", "torch.load", "ladder", "standard", "__class__", "a\nb"]
NESTED = 200  # deeper is done with text: Python itself cannot print it


def mutate_bytes(good: bytes, chance: Random) -> bytes:
    """Cut, flip, double, drop, insert, or replace altogether."""
    data = bytearray(good)
    kind = chance.randrange(8)
    if kind == 0:
        return bytes(data[: chance.randrange(len(data) + 1)])
    if kind == 1:
        return b""
    if kind == 2:
        return chance.randbytes(chance.choice([1, 7, 100, 5000]))
    if kind == 3:
        return chance.choice([b"\xff\xfe", b"\xef\xbb\xbf", b"\0"]) + bytes(data)
    if kind == 4:
        return chance.choice([b"[", b'{"a":', b"("]) * chance.choice([10, 1000, 100_000])
    for _ in range(chance.choice([1, 1, 2, 10, 100])):
        place = chance.randrange(len(data) + 1)
        if kind == 5 and place < len(data):
            data[place] ^= 1 << chance.randrange(8)
        elif kind == 6:
            data[place:place] = chance.choice([b"\0", b"\xff", b'"', b"}", b"-", b"9" * 40, b"\\u0000", b"\n"])
        else:
            del data[place : place + chance.choice([1, 3, 50])]
    return bytes(data)


def hostile_value(chance: Random, old: Any = None, depth: int = 0) -> Any:
    """Any JSON value, often near the old one in kind."""
    kind = chance.randrange(9)
    if kind == 0 and isinstance(old, int) and not isinstance(old, bool):
        return chance.choice([old + 1, old - 1, -old, old * 2, old * 1000, old * 10**9, float(old), str(old)])
    if kind <= 2:
        return chance.choice(NUMBERS)
    if kind <= 4:
        return chance.choice(WORDS)
    if kind == 5:
        return chance.choice([None, True, False])
    if depth > 3:
        return {}
    if kind == 6:
        return [hostile_value(chance, old, depth + 1) for _ in range(chance.choice([0, 1, 3, 300 if depth == 0 else 2]))]
    if kind == 7:
        return {
            chance.choice([*WORDS, "a", "b"]): hostile_value(chance, old, depth + 1) for _ in range(chance.choice([0, 1, 3]))
        }
    value: Any = 0
    for _ in range(NESTED):
        value = [value]
    return value


def mutate_document(good: Any, chance: Random, extra_keys: Sequence[str] = ()) -> Any:
    """A copy with a few values replaced, removed, added or exchanged, anywhere in it."""
    document = copy.deepcopy(good)
    for _ in range(chance.choice([1, 1, 1, 2, 5])):
        parent = document
        while True:  # walk down to some place
            keys = list(parent) if isinstance(parent, dict) else list(range(len(parent)))
            if not keys:
                break
            key = chance.choice(keys)
            if isinstance(parent[key], dict | list) and chance.random() < 0.7:
                parent = parent[key]
                continue
            action = chance.randrange(5)
            if action == 0:
                del parent[key]
            elif action == 1 and isinstance(parent, dict):
                parent[chance.choice([*extra_keys, *WORDS])] = hostile_value(chance, parent[key])
            elif action == 2 and len(keys) > 1:
                other = chance.choice(keys)
                parent[key], parent[other] = parent[other], parent[key]
            else:
                parent[key] = hostile_value(chance, parent[key])
            break
    return document


def json_bytes(document: Any) -> bytes:
    """With lone surrogates and NaN as some writers leave them."""
    return json.dumps(document).encode()


def broken_json(good: Any, chance: Random, extra_keys: Sequence[str] = ()) -> bytes:
    """Mostly JSON with wrong values, sometimes no JSON."""
    if chance.random() < 0.75:
        return json_bytes(mutate_document(good, chance, extra_keys))
    return mutate_bytes(json_bytes(good), chance)


def broken_toml(good: str, chance: Random, extra_keys: Sequence[str] = ()) -> bytes:
    if chance.random() < 0.5:
        return mutate_bytes(good.encode(), chance)
    document = tomllib.loads(good)
    changed = other_number(document, chance) if chance.random() < 0.4 else mutate_document(document, chance, extra_keys)
    return toml_text(changed).encode("utf-8", "surrogatepass")


def other_number(good: Any, chance: Random) -> Any:
    """A copy with one number a little different: often still good, and then to be obeyed."""
    document = copy.deepcopy(good)
    parents = [document]
    for parent in parents:
        items = parent.values() if isinstance(parent, dict) else parent
        parents += [item for item in items if isinstance(item, dict | list)]
    places = [
        (parent, key)
        for parent in parents
        for key in (parent if isinstance(parent, dict) else range(len(parent)))
        if type(parent[key]) in (int, float)
    ]
    if places:
        parent, key = chance.choice(places)
        old = parent[key]
        near = [old + 1, old * 2, old * 3, max(1, old // 2)] if isinstance(old, int) else [old * 1.1, old / 2, old * 3, 0.0]
        parent[key] = chance.choice(near)
    return document


def toml_text(value: Mapping[str, Any], heading: str = "") -> str:
    """Tables, and lists of them, of plain values; what TOML cannot say comes out wrong, which is what is wanted."""
    lines, tables = [], []
    for key, item in value.items():
        name = heading + json.dumps(key)
        if isinstance(item, dict):
            tables.append(f"[{name}]\n" + toml_text(item, f"{name}."))
        elif isinstance(item, list) and item and all(isinstance(each, dict) for each in item):
            tables += [f"[[{name}]]\n" + toml_text(each, f"{name}.") for each in item]
        else:
            lines.append(f"{json.dumps(key)} = {json.dumps(item)}\n")
    return "".join(lines + tables)


def hostile_text(chance: Random, words: Sequence[str]) -> str:
    """Prose of ``words``, special tokens, control characters, lone surrogates; now and then a megabyte of it."""
    kind = chance.randrange(12)
    if kind == 0:
        return chance.choice(["", " ", "\n", "\0", "\t\t", "\u200b", "\ufeff"])
    if kind == 1:
        return "".join(chr(chance.randrange(0x110000)) for _ in range(chance.choice([1, 20, 2000])))
    if kind == 2:
        return chance.choice(["a", "ab ", "\U0001f600", "\u0301", "((", "1" * 50 + " "]) * chance.choice([100, 5000])
    if kind == 3 and chance.random() < 0.1:
        unit = chance.choice(["once upon a time ", "a", "\U0001f600 "])
        return unit * ((1 << 20) // len(unit.encode()) + 1)
    pieces = [*words, *WORDS]
    return "".join(chance.choice(pieces) + chance.choice([" ", "", "\n"]) for _ in range(chance.choice([1, 3, 10, 60])))
