"""The commands and the example of docs/data.md run; those that need the hub or a GPU are at least understood."""

import re
import shlex
from pathlib import Path

import typer
from typer.testing import CliRunner

from ladder_residual.cli.data import app as data_app
from ladder_residual.cli.main import app
from ladder_residual.data.sources import MAX_CHUNK

TEXT = (Path(__file__).parents[2] / "docs" / "data.md").read_text(encoding="utf-8")


def test_the_page_runs_from_top_to_bottom(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    commands = [line for block in re.findall(r"^```bash\n(.*?)^```", TEXT, re.S | re.M) for line in block.splitlines()]
    assert len(commands) == 4
    for command in commands:
        done = CliRunner().invoke(app, shlex.split(command)[1:])
        assert done.exit_code == 0, f"{command}: {done.exception!r}"
    assert "checksums right" in done.stdout
    assert len(list(Path("corpus").glob("*.tokens"))) > 1
    examples = re.findall(r"^```python\n(.*?)^```", TEXT, re.S | re.M)
    assert len(examples) == 1
    exec(compile(examples[0], "data.md", "exec"), {})


def test_commands_in_the_text_are_understood():
    """Parsed, not run: their words must be those of the command line."""
    commands = [line for line in re.findall(r"`(ladder data [^`]*)`", TEXT) if "SOURCE" not in line]
    assert len(commands) >= 3
    known = typer.main.get_command(data_app).commands
    for command in commands:
        name, *words = shlex.split(command)[2:]
        known[name].make_context(name, words)


def test_the_number_in_the_text_is_the_one_in_the_code():
    assert f"{MAX_CHUNK >> 10} Ki characters" in TEXT
