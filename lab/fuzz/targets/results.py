"""Result files: for ``ladder report``, and what ``ladder eval`` reads (requests, scores, evaluations)."""

from __future__ import annotations

import gzip
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from random import Random
from typing import Any

from lab.fuzz.box import Box
from lab.fuzz.judge import check_values, require
from lab.fuzz.mutate import broken_json, hostile_value, mutate_bytes

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


FIGURES = {"metric": "acc", "shots": 0, "n": 2, "value": 0.5, "stderr": 0.1, "higher_is_better": True, "shown": True}
EVALUATION: dict[str, Any] = {
    "format": "ladder-residual evaluation 1",
    **{"model": "m", "wiring": "ladder", "dtype": "float32", "tp": 1, "commit": "c", "date": "d", "machine": "x", "torch": "2"},
    "rows": [{"task": "piqa", **FIGURES}, {"task": "boolq", **FIGURES}],
    "items": {"piqa": {"acc": {"rows": "x", "values": [0, 1]}}},
    "caveats": {"piqa": ["a caveat"]},
    "perplexity": {
        **{"file": "t", "context": 8, "stride": 4, "tokens": 8, "nats_per_token": 2.0, "ppl": 7.4, "word_ppl": 9.0},
        **{"bits_per_byte": 1.0, "windows": [[4, 8.0], [4, 8.5]]},
    },
}


def evaluation(box: Box, chance: Random) -> None:
    """Broken requests, scores and evaluations: refused as they are read, or used as the file says."""
    from ladder_residual.evaluate.markdown import render
    from ladder_residual.evaluate.requests import Request, Requests, load_scores
    from ladder_residual.evaluate.results import load
    from ladder_residual.evaluate.run import with_comparison
    from ladder_residual.evaluate.table import side_by_side

    box.empty()
    file, kind, packed = box.path / "file", chance.randrange(3), chance.random() < 0.3
    if kind == 0:
        Requests({"a": [Request([1, 2], [3])] * 2, "b": [Request([4], [5, 6])]}, {"tokenizer": "t"}).save(file)
        header, *rows = gzip.decompress(file.read_bytes()).splitlines()
        if packed:
            file.write_bytes(mutate_bytes(file.read_bytes(), chance))
        else:
            rows[0] = broken_json(json.loads(rows[0]), chance) if chance.random() < 0.5 else rows[0]
            file.write_bytes(gzip.compress(b"\n".join([broken_json(json.loads(header), chance), *rows])))
        found = Requests.load(file)
        said = [json.loads(line) for line in gzip.decompress(file.read_bytes()).decode().splitlines()]
        check_values([[*one] for group in found.groups.values() for one in group], said[1:])
        check_values({name: len(group) for name, group in found.groups.items()}, said[0]["groups"])
    elif kind == 1:
        scores = {"format": "ladder-residual scores 1", "model": "m", "scores": {"a": [-1.5, 1], "b": [-2.0, 0]}}
        content = broken_json(scores if chance.random() < 0.7 else {"one": scores, "two": scores}, chance, ["format", "scores"])
        file.write_bytes(mutate_bytes(gzip.compress(content), chance) if packed else content)
        for one in load_scores(file).values():
            require(all(math.isfinite(score.logprob) for score in one.by_key.values()), "a score that is not finite was read")
    else:
        file.write_bytes(broken_json(EVALUATION, chance, ["stderr", "perplexity", "lm_eval", "gpu", "limit", "against"]))
        result = load(file)
        render(with_comparison(EVALUATION, result))
        side_by_side({"ours": EVALUATION, "theirs": result})
