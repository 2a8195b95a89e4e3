"""The page docs/serving.md: its tables are what the planner and the results say, its other commands parse. (Those that convert and
serve are run by test_server.py and test_nodes.py, three of those that measure by test_server.py and test_bench.py.)"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys

import guide
import pytest
import typer

from ladder_residual.cli import app


def test_the_tables_are_what_the_planner_and_the_results_say() -> None:
    assert guide.TEXT.count("<!-- table: ") >= 3
    done = subprocess.run(
        [sys.executable, guide.ROOT / "tools" / "serving_tables.py", "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("command", guide.commands("Measuring"))
def test_the_measuring_commands_parse(command: str) -> None:
    """They take many minutes. In small, test_server.py runs the one with --url, test_bench.py those with --link 1ms and of one rank;
    the other two only parse here."""
    program, group, name, *rest = shlex.split(command)
    assert (program, group) == ("ladder", "bench")
    parser = typer.main.get_command(app).commands["bench"].commands[name]
    parser.make_context(name, rest)


def test_installing_is_what_the_project_says() -> None:
    assert guide.commands("From a hub id to a served ladder model")[0] == "pip install vllm ladder-residual"
    assert 'name = "ladder-residual"' in (guide.ROOT / "pyproject.toml").read_text(encoding="utf-8")


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", guide.TEXT):
        assert (guide.ROOT / "docs" / target).exists(), target
