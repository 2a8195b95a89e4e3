"""Result files for ``ladder report``."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from random import Random
from typing import Any

from lab.fuzz.box import Box
from lab.fuzz.judge import require
from lab.fuzz.mutate import broken_json, hostile_value

ROOT = Path(__file__).parents[3]
PUBLISHED = 60_000  # bytes; larger ones take long and say nothing new


class _Page(HTMLParser):
    """Tags and attributes of a page; text that became a tag shows here."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.handlers: set[str] = set()
        self.drawn: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        for name, value in attrs:
            if name.startswith("on"):
                self.handlers.add(name)
            if name in ("x", "y", "x1", "x2", "y1", "y2", "cx", "cy", "d", "points", "width", "height", "transform"):
                self.drawn.append(value or "")


def documents() -> list[Any]:
    """Small published results, and one of each kind that none of them is."""
    files = [path for path in sorted((ROOT / "results").rglob("*.json")) if path.stat().st_size < PUBLISHED]
    own: list[Any] = [
        {"quality": [{"converted_layers": 0, "value": 1.0}, {"converted_layers": 16, "value": 1.2}], "metric": "loss"},
        {"models": {"a": {"t": {"value": 0.5, "stderr": 0.01}}}, "tasks": {"t": {"shots": 0}}},
        {"benchmark": "x", "rows": [{"a": 1, "b": "text", "c": None}, {"a": 2.5, "d": [1]}]},
    ]
    return own + [json.loads(path.read_text(encoding="utf-8")) for path in files]


_DOCUMENTS: list[Any] = []


def report(box: Box, chance: Random) -> None:
    """Broken results: refused, or shown in a page without code, without tags of their own, and without NaN in its drawings."""
    from ladder_residual.report.page import write_report

    _DOCUMENTS.extend([] if _DOCUMENTS else documents())
    box.empty()
    names = chance.choice([["result.json"], ["result.json"], ["a.json", "b.json"], ["<b>.json"]])
    for name in names:
        document = chance.choice(_DOCUMENTS)
        content = broken_json(document, chance, ["selection", "curves", "traceEvents", "kind", "quality", "points", "rows"])
        (box.path / name).write_bytes(content if chance.random() < 0.95 else json.dumps(hostile_value(chance)).encode())
    written = write_report([box.path], box.path / "page" / "report.html", box.path / "plots" if chance.random() < 0.3 else None)
    for path in written:
        text = path.read_text(encoding="utf-8")
        page = _Page()
        page.feed(text)
        require("script" not in page.tags and not page.handlers, f"{path.name} holds code")
        require(not any(re.search(r"(?i)\b(nan|inf|infinity)\b", value) for value in page.drawn), f"{path.name} draws NaN")
        require("\x1b" not in text and "\0" not in text, f"{path.name} holds control characters")
