"""What the pages of this repository hold: blocks, commands, tables, links."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

ROOT = Path(__file__).parents[2]
GUIDES = sorted((ROOT / "docs").glob("*.md"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "lab" / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def fences(text: str) -> list[tuple[str, str, str]]:
    """Every fenced block in its order: language, what follows it on its line, content."""
    found = re.findall(r"^ *```(\w*)([^\n]*)\n(.*?)^ *```", text, re.S | re.M)
    return [(language, after.strip(), content) for language, after, content in found]


def blocks(text: str, *languages: str) -> list[tuple[str, str]]:
    """Fenced blocks of these languages: what follows the language on its line, and the content."""
    return [(after, content) for language, after, content in fences(text) if language in languages]


def commands(text: str, *languages: str) -> list[list[str]]:
    """The lines of these blocks as words, without comments."""
    lines = [line for _, content in blocks(text, *languages) for line in content.splitlines() if line.strip()]
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def inline_code(text: str) -> list[str]:
    """What stands between backticks outside of blocks, on one line."""
    plain = re.sub(r"^ *```.*?^ *```", "", text, flags=re.S | re.M)
    return [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", plain)]


def tables(text: str) -> list[list[list[str]]]:
    """Every Markdown table as rows of cells."""
    found: list[list[list[str]]] = []
    inside = False
    for line in text.splitlines():
        if line.startswith("|"):
            if not inside:
                found.append([])
            found[-1].append([cell.strip() for cell in line.strip("|").split(" | ")])
        inside = line.startswith("|")
    return found
