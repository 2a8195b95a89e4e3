"""The commands of docs/serving.md parse. Those that convert and serve are run by test_server.py and test_nodes.py, three of those that
measure by test_server.py and test_bench.py."""

from __future__ import annotations

import importlib
import re
import shlex

import guide
import pytest
import typer


@pytest.mark.parametrize("command", guide.commands("Measuring"))
def test_the_measuring_commands_parse(command: str) -> None:
    """They take many minutes. In small, test_server.py runs the one with --url, test_bench.py those with --link 1ms and of one rank;
    the other two only parse here."""
    python, minus_m, module, *rest = shlex.split(command)
    assert (python, minus_m) == ("python", "-m")
    typer.main.get_command(importlib.import_module(module).app).make_context(module, rest)


def test_installing_is_what_the_project_says() -> None:
    assert guide.commands("From a hub id to a served ladder model")[0] == "pip install vllm ladder-residual"
    assert 'name = "ladder-residual"' in (guide.ROOT / "pyproject.toml").read_text(encoding="utf-8")


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", guide.TEXT):
        assert (guide.ROOT / "docs" / target).exists(), target
