"""Guides are short and plain, and what they tell a reader to type runs and prints what they show."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import GUIDES, PAGES, ROOT, fences, text_of

BIN = Path(sys.executable).parent
CONTRIBUTORS = {"architecture.md"}  # a longer page, not a task
# What a guide's commands need beside its folder, and what is run elsewhere: the lab in test_commands.py, GPUs there too.
NEEDS = {"training.md": "recipes"}
LISTED = re.compile(r"^ *(?:[-*]|\d+\.) ")


def paragraphs(text: str) -> list[str]:
    """Runs of prose: what stands between blank lines, fences, tables, headings and list items."""
    found, current = [], []
    for line in [*re.sub(r"^ *```.*?^ *```$", "", text, flags=re.S | re.M).splitlines(), ""]:
        if not line.strip() or line.lstrip().startswith(("|", "#", "!", "<")) or LISTED.match(line):
            found.append(" ".join(current))
            current = []
        if line.strip() and not line.lstrip().startswith(("|", "#", "!", "<")):
            current.append(line.strip())
    return [paragraph for paragraph in found if paragraph]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_prose_is_in_short_paragraphs_and_lines(page):
    text = re.sub(r"^ *```.*?^ *```$", "", text_of(page), flags=re.S | re.M)
    for paragraph in paragraphs(text):
        assert len(paragraph.split()) <= 120, paragraph
    for line in text.splitlines():
        if not line.lstrip().startswith("|"):
            assert len(line) <= 400, line


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.name)
def test_a_guide_is_short_and_begins_with_a_command_or_a_picture(page):
    text = text_of(page)
    if page.name not in CONTRIBUTORS:
        assert len(text.splitlines()) <= 160
    for code in re.findall(r"\b[0-9a-f]{7,12}\b", text):
        assert code.isdigit() or not re.search(r"\d", code), f"{page.name} names the commit {code}"


def test_the_guides_together_are_a_short_book():
    assert sum(len(text_of(page).split()) for page in GUIDES) <= 15_000


def test_long_paragraphs_are_found():
    text = "# A\n\none\ntwo\n- three\n- four\n\n| a |\n|---|\n\n```\ncode\n```\nfive"
    assert paragraphs(text) == ["one two", "- three", "- four", "five"]


def plain(text: str) -> str:
    """Without digits and layout, which differ from run to run and from terminal to terminal."""
    return re.sub(r"\s+", " ", re.sub(r"\d[\d.,]*", "0", text))


def run(words: list[str], folder: Path) -> str:
    environment = os.environ | {
        "PATH": f"{BIN}:{os.environ['PATH']}",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "120",
    }
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, f"{' '.join(words)}\n{done.stdout[-1000:]}\n{done.stderr[-2000:]}"
    assert "Traceback" not in done.stderr
    return done.stdout + done.stderr


RUN = [
    page
    for page in GUIDES
    if any(language in ("bash", "python") for language, *_ in fences(text_of(page))) and page.stem != "engine"
]


@pytest.mark.slow
@pytest.mark.parametrize("page", RUN, ids=lambda page: page.stem)
def test_a_guide_runs_from_top_to_bottom(page, tmp_path):
    """As a reader types it, in one folder; what it shows of the output is there."""
    if page.name in NEEDS:
        shutil.copytree(ROOT / NEEDS[page.name], tmp_path / NEEDS[page.name])
    printed = ""
    for language, name, content in fences(text_of(page)):
        if language in ("jsonl", "toml") and name:
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(content, encoding="utf-8")
        elif language == "bash":
            for line in content.splitlines():
                words = shlex.split(line, comments=True)
                if (words and words[:2] != ["python", "-m"]) or "ladder_residual" in line:
                    printed += run(words, tmp_path)
        elif language == "python":
            printed += run([sys.executable, "-c", content], tmp_path)
        elif language == "text" and printed:
            for line in content.splitlines():
                assert plain(line).strip() in plain(printed), f"{page.name} shows {line!r}"
