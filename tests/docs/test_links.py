"""Links lead somewhere, and files that pages name exist."""

from __future__ import annotations

import importlib
import re

import pytest

from tests.docs.pages import PAGES, ROOT, inline_code, tables, text_of

LINK = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)|src=\"([^\":]+)\"")
# A file of the repository: a path with a folder and an ending we keep.
FILE = re.compile(r"(?:[\w.-]+/)+[\w.-]+\.(?:py|md|toml|json|sh|svg|log|yml|cff)")
# Files that readers or commands make.
MADE = ("OUT", "DIR", "runs/", "checkpoints/", "data/", "work", "questions/", "TEXTS")


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md"], ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for target in LINK.findall(text_of(page)):
        path = page.parent / (target[0] or target[1])
        assert path.exists(), f"{page.relative_to(ROOT)} links to {path}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_that_are_named_exist(page):
    for code in inline_code(text_of(page)):
        for name in FILE.findall(code):
            if code.startswith(("ladder ", "torchrun ")) or name.startswith(MADE):
                continue
            places = (ROOT, ROOT / "src", ROOT / "src" / "ladder_residual", ROOT / "lab", ROOT / "docs", page.parent)
            assert any((place / name).exists() for place in places), f"{page.relative_to(ROOT)} names {name}"


def test_pages_are_found_from_the_readme():
    """Every page is linked from README, or from a page that is."""
    found, seen = [ROOT / "README.md"], set()
    while found:
        page = found.pop()
        if page in seen:
            continue
        seen.add(page)
        found += [(page.parent / target[0]).resolve() for target in LINK.findall(text_of(page)) if target[0].endswith(".md")]
    assert {page for page in PAGES if page.is_relative_to(ROOT / "docs")} <= seen


def test_what_the_changelog_says_things_are_called_now_exists():
    """Modules, scripts and pages in the last column of its tables."""
    checked = 0
    for table in tables(text_of(ROOT / "CHANGELOG.md")):
        for *_, now in table[2:]:
            for name in re.findall(r"`([^`]+)`", now):
                words = name.removeprefix("python -m ").split()[0].split(".")
                if table[0][0] == "module before" or name.startswith("python -m lab"):
                    folder = ROOT if words[0] in ("lab", "tests") else ROOT / "src" / "ladder_residual"
                    path = folder.joinpath(*words)
                    assert path.is_dir() or path.with_suffix(".py").exists() or "NAME" in words, name
                    checked += 1
                elif name.startswith(("results/", "lab/")):
                    assert list(ROOT.glob(name)), name
                elif table[0][0] == "name in Python before" and "." in name:
                    module = importlib.import_module("ladder_residual." + ".".join(words[:-1]))
                    assert hasattr(module, words[-1]), name
                    checked += 1
    assert checked > 150


def test_files_of_a_package_are_where_the_architecture_says():
    """A paragraph begins with its packages in bold; file names without a folder are in one of them."""
    checked = 0
    for paragraph in text_of(ROOT / "docs" / "architecture.md").split("\n\n"):
        packages = re.findall(r"\*\*`([a-z_]+)/`\*\*", paragraph)
        for name in re.findall(r"`([a-z_]+\.py)`", paragraph) if packages else ():
            places = [ROOT / "src" / "ladder_residual" / package / name for package in packages]
            assert any(place.exists() for place in places), f"there is no {name} in {' or '.join(packages)}"
            checked += 1
    assert checked > 30
