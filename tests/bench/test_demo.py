"""``ladder demo`` as users start it."""

import json
import sys
from pathlib import Path

from ladder_residual.cli.demo import not_on_path
from tests.forked import run_program


def test_the_demo_shows_what_it_promises():
    done = run_program("demo", "--json")
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads(done.stdout)
    assert result["same_text"]
    assert {row["wiring"] for row in result["overlap"]["rows"]} == {"standard", "ladder:last-half", "ladder", "no-comm"}
    losses = result["losses"]
    assert 1.2 < losses["standard"] < 1.4  # the loss of a model that knows the language of these stories
    assert losses["standard"] < losses["ladder:last-half"] < losses["ladder"]


def test_the_demo_says_where_the_command_is(monkeypatch):
    folder = Path(sys.executable).parent
    monkeypatch.setenv("PATH", "/usr/bin")
    assert not_on_path() == folder
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin")
    assert not_on_path() is None
