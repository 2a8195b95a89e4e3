"""Results are data: no prose in them. Generated pages hold the tables their builders make from them."""

from __future__ import annotations

import json
import re

import pytest

from lab.reports.__main__ import BUILDERS, build, index
from lab.reports.__main__ import PAGES as REPORTS
from lab.reports.recovery_results import Results
from lab.reports.recovery_tasks import task_cells
from tests.docs.pages import ROOT, tables, text_of

FILES = sorted((ROOT / "results").rglob("*.json"))
# What a program printed or a model wrote is data, however long.
QUOTED = {"command", "message", "text"}
LONGEST = 120
SENTENCE = re.compile(r"[a-z)][.!?] +[A-Z]|\w+ \w+ \w+ \w+.*[.!?]$")


def prose(value: object, key: str = "") -> list[str]:
    """Where a document holds words for people: a key for notes, a long string, a sentence."""
    if isinstance(value, dict):
        found = [f"key {name!r}" for name in value if name in ("note", "notes", "remark", "comment", "commit_note")]
        return found + [one for name, part in value.items() for one in prose(part, name)]
    if isinstance(value, list):
        return [one for part in value for one in prose(part, key)]
    if isinstance(value, str) and key not in QUOTED and (len(value) > LONGEST or SENTENCE.search(value)):
        return [f"{key}: {value[:80]!r}"]
    return []


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT / "results")))
def test_a_result_holds_no_prose(file):
    assert prose(json.loads(file.read_text(encoding="utf-8"))) == []


def test_prose_is_recognised():
    assert prose({"rows": [{"notes": []}]}) == ["key 'notes'"]
    assert prose({"why": "It was slow. Why was not looked into"})
    assert prose({"why": "the other run was slower on that day."})
    assert prose({"why": "x" * (LONGEST + 1)})
    assert not prose({"why": "KL 0.2486 against 0.3178 of the last layers", "torch": "2.11.0+cu130", "message": "error: a. B"})


def test_results_are_json_or_logs_of_what_was_run():
    """Traces come with their picture, checkpoints' answers as JSON lines."""
    kinds = {path.suffix for path in (ROOT / "results").rglob("*") if path.is_file()}
    assert kinds == {".json", ".jsonl", ".log", ".svg"}


@pytest.mark.parametrize("name", BUILDERS)
def test_the_tables_of_a_page_are_those_of_its_builder(name):
    for file, content in build([name]).items():
        committed = text_of(ROOT / "docs" / "results" / file)
        if file.endswith(".md"):
            assert tables(committed) == tables(content), f"{file} is old: run `make docs-results`"
            assert tables(content)
        else:
            assert len(re.findall(r"<(?:polyline|path|circle)", committed)) == len(
                re.findall(r"<(?:polyline|path|circle)", content)
            )


def test_the_index_names_every_page():
    assert text_of(ROOT / "docs" / "results" / "README.md") == index()
    pages = {path.name for path in (ROOT / "docs" / "results").glob("*.md")}
    assert pages == {"README.md", *(f"{name}.md" for name in REPORTS)}


@pytest.mark.parametrize("name", REPORTS)
def test_a_page_of_results_is_short(name):
    """Tables that fit a page, two or three sentences of reading each, and a command or the section before has it."""
    text = text_of(ROOT / "docs" / "results" / f"{name}.md")
    assert len(text.split()) <= 1500
    for part in text.split("\n## ")[1:]:
        reading = part.split("\n\n")[1]
        assert len(re.findall(r"[.!?](?= |$)", reading)) <= 3, reading
    for found in tables(text):
        assert len(found[0]) <= 11, found[0]
        assert len(found) <= 30


def test_figures_that_guides_quote_are_those_of_the_results():
    guide = {page.stem: " ".join(text_of(page).split()) for page in (ROOT / "docs").glob("*.md")}
    served = json.loads((ROOT / "results" / "serve" / "cpu-tp2.json").read_text(encoding="utf-8"))["rows"]
    cpu = [
        next(row["speedup"] for row in served if (row["wiring"], row["rate"]) == ("ladder", rate)) for rate in ("one", "inf")
    ]
    gains = {"CPU ranks": cpu}
    for transport, name in (("ipc", "vLLM's IPC"), ("nccl", "NCCL over sockets")):
        gains[name] = [own / ladder for own, ladder in gpu_times(transport, ("batch 1", "batch 16"))]
    for name, (one, several) in gains.items():
        (row,) = re.findall(rf"\| {name}[^|]*\|[^|]*\| ([^|]*) \| ([^|]*) \|", guide["serving"])
        assert row == (f"{one:.2f}x", f"{several:.2f}x"), name
    planned = re.findall(
        r"plans ([\d.]+x) .* NVLink, ([\d.]+x) without peer-to-peer, and ([\d.]+x) with a one-shot", guide["serving"]
    )
    page = text_of(ROOT / "docs" / "results" / "serving.md")
    links = ("NCCL over NVLink", "NCCL without peer-to-peer", r"one-shot [^|]*")
    assert planned == [tuple(re.findall(rf"\| {link} \| 1 \| [^|]* \| ([\d.]+x) ", page)[0] for link in links)]


def gpu_times(transport, measurements):
    """vLLM's own milliseconds and ladder's."""
    result = {"nccl": "gpu-nccl-tp1", "ipc": "gpu-ipc"}[transport]
    rows = json.loads((ROOT / "results" / "serve" / f"{result}.json").read_text(encoding="utf-8"))["parts"][transport]["rows"]
    times = {row["name"]: row["ms"] for row in rows}
    return [(times[name][f"{transport}-own"], times[name][f"{transport}-ladder"]) for name in measurements]


def test_the_recovery_figures_of_the_guide_are_those_of_the_results():
    guide = " ".join(text_of(ROOT / "docs" / "converting.md").split())
    results = Results(ROOT / "results" / "adapt")
    runs = [run for layers in (15, 20, 30) for run in results.target_runs(layers)]
    closed = [results.closed(run, "wikitext2") for run in runs]
    tokens = [run["tokens"] / 1e6 for run in runs]
    assert f"on {min(tokens):.0f} to {max(tokens):.0f} million tokens closes {min(closed):.0f} to {max(closed):.0f} %" in guide
    for name in ("distill 15 chosen, own samples", "distill 15 chosen, fine-tuned teacher"):
        assert sum(cell.startswith("**") for cell in task_cells(results, name)) == 3
    assert "three of five tasks stay within one standard error" in guide
    assert all(results.tasks["models"][run["name"]]["hellaswag"]["difference"] < 0 for run in runs)
    curves = results.selection["curves"]["books_heldout"]
    assert curves["ours"][19]["rise"] / curves["last-k"][19]["rise"] == pytest.approx(1 / 5, rel=0.05)
