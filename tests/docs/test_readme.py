"""README: its commands and examples run. Its table is checked with the other generated ones, in test_results.py."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ladder_residual.cli.main import app
from tests.docs.pages import ROOT, blocks, commands, text_of
from tests.forked import run_program

README = ROOT / "README.md"
TEXT = text_of(README)
BIN = Path(sys.executable).parent


def run(words, folder):
    environment = os.environ | {"PATH": f"{BIN}:{os.environ['PATH']}", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{words}\n{done.stdout[-1000:]}\n{done.stderr[-2000:]}"
    return done.stdout


def test_commands_and_examples_run(tmp_path, monkeypatch):
    """In this process, but for what starts ranks of its own: in a fork."""
    monkeypatch.chdir(tmp_path)
    for words in commands(TEXT, "bash"):
        if "--tp" in words and words[1] == "generate":
            program = run_program(*words[1:], cwd=tmp_path)
            assert program.returncode == 0, program.stderr
        else:
            done = CliRunner().invoke(app, words[1:])
            assert done.exit_code == 0, (words, done.exception)
    (example,) = (code for _, code in blocks(TEXT, "python"))
    exec(compile(example, "README.md", "exec"), {})


@pytest.mark.slow
@pytest.mark.parametrize("page", [README, ROOT / "docs" / "architecture.md"], ids=lambda page: page.name)
def test_commands_and_examples_run_as_written(page, tmp_path):
    for words in [
        *commands(text_of(page), "bash"),
        *([sys.executable, "-c", code] for _, code in blocks(text_of(page), "python")),
    ]:
        run(words, tmp_path)


def test_the_readme_is_a_screen_and_a_half():
    assert len(TEXT.splitlines()) <= 90
    assert len(TEXT.split()) <= 700


def test_the_two_commands_are_what_ci_runs():
    ci = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    for command in ("make demo", "make test"):
        assert re.search(rf"^{command} ", TEXT, re.M)
        assert command in ci


def test_the_families_are_those_of_the_package():
    from ladder_residual.models.families import FAMILIES

    listed = re.search(r"^Families: (.*?)\.$", TEXT, re.S | re.M)[1]
    assert {name.split()[0] for name in listed.split(",")} == set(FAMILIES)
    assert f"for {len(FAMILIES)} Hugging Face families" in " ".join(TEXT.split())


def test_the_example_runs(capsys):
    runpy.run_path(str(ROOT / "examples" / "ladder_vit.py"), run_name="__main__")
    assert capsys.readouterr().out.count("loss after 30 steps") == 3
