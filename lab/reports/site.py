"""Hooks of mkdocs (mkdocs.yml): pages that the code writes, and files of the repository that pages link to.

On a forge a page links to ``../CONTRIBUTING.md``. The site has docs/ alone, so what lies outside is put under ``repository/``
and the links follow.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from typer.cli import get_docs_for_click

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"(?<=\]\()([^)#:\s]+)(?=[)#])")
FILE_NAME = re.compile(r"\[[^\]\s]*\.md\]\(([^)#:\s]+)\)")  # a link whose text is the file's name
EXAMPLE = re.compile(r"^Example: (ladder .+?) *$", re.M)
TRUNCATED = re.compile(r"\*\*Commands\*\*:\n\n(?:\* .*\n)+\n")  # typer's lists of commands, cut after some words
OUTSIDE = "repository"  # where the site keeps what lies outside docs/
COMMANDS = "<!-- every command of ladder -->"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """README is the first page; files outside docs/ that a page links to come with it, and what those link to."""
    files.append(_generated(config, "README.md"))
    waiting, seen = [file.src_uri for file in files.documentation_pages()], set()
    while waiting:
        uri = waiting.pop()
        path = _source(uri)
        for target in LINK.findall(path.read_text(encoding="utf-8")):
            name = posixpath.normpath(posixpath.join(path.parent.relative_to(ROOT).as_posix(), target))
            if name in seen or name == "README.md" or name.startswith("docs/") or not (ROOT / name).is_file():
                continue
            seen.add(name)
            files.append(_generated(config, name))
            if name.endswith(".md"):
                waiting.append(_site_uri(name))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    folder = _source(page.file.src_uri).parent.relative_to(ROOT).as_posix()
    here = posixpath.dirname(page.file.src_uri)

    titles = dict(_titles(config.nav))

    def site_uri(link: str) -> str:
        return _site_uri(posixpath.normpath(posixpath.join(folder, link)))

    def moved(link: re.Match[str]) -> str:
        return posixpath.relpath(site_uri(link[1]), here or ".")

    def titled(link: re.Match[str]) -> str:
        title = titles.get(site_uri(link[1]))
        return f"[{title}]({link[1]})" if title else link[0]

    markdown = LINK.sub(moved, FILE_NAME.sub(titled, markdown))
    return markdown.replace(COMMANDS, commands()) if COMMANDS in markdown else markdown


def _titles(entries: Any, section: str = "") -> Iterator[tuple[str, str]]:
    """Page and title of every entry of the navigation; a section's own page has the section's title."""
    for entry in entries:
        if isinstance(entry, str):
            yield entry, section
            continue
        for title, below in entry.items():
            if isinstance(below, str):  # "Recovery" is a page of results and one of the lab
                yield below, f"{section}: {title}" if section in ("Results", "Lab notes") else title
            else:
                yield from _titles(below, title)


def commands() -> str:
    """Every command with its options, as its ``--help`` has them."""
    from ladder_residual.cli.main import app

    command = typer.main.get_command(app)
    text = get_docs_for_click(obj=command, ctx=typer.Context(command, info_name="ladder"), name="ladder")
    text = EXAMPLE.sub(r"Example: `\1`", text)
    return TRUNCATED.sub("", text.split("\n", 1)[1])  # below its heading, which the page has


def _site_uri(name: str) -> str:
    """Where the site has a file of the repository."""
    if name == "README.md":
        return "index.md"
    if name.startswith("docs/"):
        return name.removeprefix("docs/")
    return f"{OUTSIDE}/" + re.sub(r"/README\.md$", ".md", name)  # a page among others, not the index of a section


def _source(uri: str) -> Path:
    if uri == "index.md":
        return ROOT / "README.md"
    if not uri.startswith(f"{OUTSIDE}/"):
        return ROOT / "docs" / uri
    path = ROOT / uri.removeprefix(f"{OUTSIDE}/")
    return path if path.exists() else path.with_suffix("") / "README.md"


def _generated(config: MkDocsConfig, name: str) -> File:
    return File.generated(config, _site_uri(name), abs_src_path=str(ROOT / name))
