"""The commands of docs/evaluation.md run: in this process by default, as users would start them in the slow tests."""

import importlib
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ladder_residual.cli import app

PAGE = Path(__file__).parents[1] / "docs" / "evaluation.md"
BIN = Path(sys.executable).parent


def blocks(language):
    return re.findall(rf"^```{language}(.*)\n((?:.*\n)*?)```", PAGE.read_text(encoding="utf-8"), re.M)


def write_files(folder):
    for name, content in blocks("jsonl"):
        path = folder / name.strip()
        path.parent.mkdir(exist_ok=True)
        path.write_text(content, encoding="utf-8")


def commands():
    found = [shlex.split(line) for _, block in blocks("bash") for line in block.splitlines() if line.strip()]
    assert len(found) > 8
    return found


def test_the_commands_run(tmp_path, monkeypatch, capsys):
    write_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    told = {}
    for words in commands():
        if "--tp" in words:
            words = words[: words.index("--tp")]  # two ranks as such: the slow test below
        if words[0] == "ladder":
            done = CliRunner().invoke(app, words[1:])
            assert done.exit_code == 0, (words, done.exception)
            told[" ".join(words)] = done.stdout
        else:
            assert words[:2] == ["python", "-m"]
            monkeypatch.setattr(sys, "argv", words[2:])
            importlib.import_module(words[2]).main()
            told[" ".join(words)] = capsys.readouterr().out
    for _, example in blocks("python"):
        exec(compile(example, str(PAGE), "exec"), {})
    pages = list(told.values())
    assert any("| piqa | 0 | 4 | acc_norm |" in page for page in pages)
    assert any("| task | shots | rows | before | zero-shot |" in page for page in pages)
    # A checkpoint, its stored result, and scores made elsewhere: the same comparison three times.
    rows = [[line for line in page.splitlines() if line.startswith("| piqa")] for page in pages if "| difference |" in page]
    assert len(rows) == 3
    assert rows[0] == rows[1] == rows[2]


@pytest.mark.slow
def test_the_commands_run_as_written(tmp_path):
    write_files(tmp_path)
    environment = os.environ | {"PATH": f"{BIN}:{os.environ['PATH']}", "HF_HUB_OFFLINE": "1"}
    for words in commands():
        done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, f"{words}\n{done.stdout[-1000:]}\n{done.stderr[-2000:]}"
        assert "Traceback" not in done.stderr


def test_commands_for_the_hub_parse():
    """They need the network; here their words must be known to the command line."""
    from ladder_residual.evaluate.tasks import wanted_tasks

    block = next(block for _, block in blocks("") if "ladder eval DIR" in block)
    for line in block.splitlines():
        words = shlex.split(line, comments=True)
        assert wanted_tasks(words[words.index("--tasks") + 1])
        assert CliRunner().invoke(app, [*words[1:], "--limit", "0"]).exception.args[0].startswith("--limit must be")


def test_links_lead_somewhere():
    for target in re.findall(r"\]\(([^)#:]+)\)", PAGE.read_text(encoding="utf-8")):
        assert (PAGE.parent / target).exists(), target
