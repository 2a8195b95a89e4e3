"""SECURITY.md: every promise names tests that there are."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROWS = [line for line in (ROOT / "SECURITY.md").read_text(encoding="utf-8").splitlines() if line.startswith("| ")][1:]
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.split("|")[1].strip()[:40])
def test_each_promise_names_its_tests(row):
    named = NAMED.findall(row)
    assert named
    for file, name in named:
        functions = [
            node.name for node in ast.parse((ROOT / file).read_text(encoding="utf-8")).body if isinstance(node, ast.FunctionDef)
        ]
        assert name in functions, f"{file} has no {name}"


def test_it_says_where_to_report():
    assert re.search(r"Report a vulnerability to \S+@\S+", (ROOT / "SECURITY.md").read_text(encoding="utf-8"))
