"""Markdown tables: every table of a page or a report is written here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any


def table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A table that ends with a newline. ``None`` is an empty cell; bars and line ends inside a cell are escaped."""
    lines = [_line(header), "|" + "---|" * len(header) + "\n"]
    for row in rows:
        if len(row) != len(header):
            raise ValueError(f"a row has {len(row)} cells, the header has {len(header)}: {list(row)}")
        lines.append(_line(row))
    return "".join(lines)


def _line(cells: Sequence[Any]) -> str:
    return "| " + " | ".join(map(_cell, cells)) + " |\n"


def _cell(value: Any) -> str:
    return "" if value is None else str(value).replace("|", "\\|").replace("\n", " ")
