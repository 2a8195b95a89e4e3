"""Reference texts for ``lab/runs/adapt_prepare.py``: what is written to explain, from packages that anyone can install.

    apt-get download anarchism dict-foldoc debian-reference-en && pip download --no-deps gensim
    (unpack them with dpkg -x and unzip into PACKAGES)
    pip install mwparserfromhell
    python -m lab.runs.adapt_reference PACKAGES TEXTS/reference.jsonl.xz --wikitext TEXTS/wikitext2_test.raw.xz

105 Wikipedia articles (gensim's test data, CC BY-SA), the Free On-line Dictionary of Computing (GFDL), a few pages of An
Anarchist FAQ (GFDL, GPL; those the package does not compress) and the Debian Reference (GPL), as one text. No article of
WikiText-2's test is among them: the script refuses to write one.
"""

from __future__ import annotations

import argparse
import bz2
import gzip
import html
import json
import lzma
import re
from collections.abc import Iterator
from pathlib import Path

SHORTEST = 400  # characters; shorter pieces are headings and redirects


def wikipedia(packages: Path) -> Iterator[tuple[str, str]]:
    import mwparserfromhell

    (dump,) = packages.rglob("enwiki-latest-pages-articles1*-shortened.bz2")
    for page in re.findall(r"<page>.*?</page>", bz2.decompress(dump.read_bytes()).decode("utf-8"), re.S):
        name, markup = re.search(r"<title>(.*?)</title>", page), re.search(r"<text[^>]*>(.*?)</text>", page, re.S)
        title = html.unescape(name[1]) if name else ":"
        if markup is None or markup[1].startswith("#REDIRECT") or ":" in title:
            continue
        prose = re.sub(r"<ref[^>]*/>|<ref.*?</ref>|<!--.*?-->", "", html.unescape(markup[1]), flags=re.S)
        text = mwparserfromhell.parse(prose).strip_code()
        text = re.split(r"\n\s*(?:References|See also|External links|Further reading|Notes)\s*\n", text)[0]
        lines = [line for line in text.splitlines() if not re.match(r"\s*(thumb|right|left|Category:|File:|Image:|\||!)", line)]
        yield title, title + "\n\n" + re.sub(r"\n{3,}", "\n\n", "\n".join(lines))


def dictionary(packages: Path) -> Iterator[tuple[str, str]]:
    (file,) = packages.rglob("foldoc.dict.dz")
    for entry in re.split(r"\n(?=\S)", gzip.decompress(file.read_bytes()).decode("utf-8", "replace")):
        title, _, body = entry.partition("\n")
        body = re.sub(r"[{}]", "", re.sub(r"\n   ", "\n", body)).strip()
        paragraphs = (paragraph.replace("\n", " ") for paragraph in body.split("\n\n"))
        yield title, title + "\n\n" + "\n\n".join(paragraphs)


def manuals(packages: Path) -> Iterator[tuple[str, str]]:
    for file in sorted(packages.rglob("anarchism/markdown/**/*.md")):
        yield file.stem, re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", file.read_text(encoding="utf-8", errors="replace"))
    for file in packages.rglob("debian-reference.en.txt.gz"):
        for number, chapter in enumerate(re.split(r"\n(?=Chapter \d+\. )", gzip.decompress(file.read_bytes()).decode("utf-8"))):
            yield f"Debian Reference {number}", chapter


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("packages", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--wikitext", type=Path, required=True, help="wikitext2_test.raw.xz: its titles must not occur")
    arguments = parser.parse_args()
    test = lzma.decompress(arguments.wikitext.read_bytes()).decode("utf-8")
    tested = {re.sub(r"\W", "", title).lower() for title in re.findall(r"^ = ([^=]+) = *$", test, re.M)}
    with lzma.open(arguments.target, "wt", encoding="utf-8") as sink:
        for source in (wikipedia, dictionary, manuals):
            texts = [(title, text.strip()) for title, text in source(arguments.packages)]
            texts = [(title, text) for title, text in texts if len(text) >= SHORTEST]
            for title, text in texts:
                if re.sub(r"\W", "", title).lower() in tested:
                    raise SystemExit(f"{title!r} is an article of WikiText-2's test")
                sink.write(json.dumps({"text": text}) + "\n")
            print(f"{source.__name__:12} {len(texts):6,} texts, {sum(len(text) for _, text in texts):,} characters")


if __name__ == "__main__":
    main()
