"""The commands of docs/planning.md run, and its numbers are what the commands print."""

import re
import shlex
import subprocess
import sys
import tomllib

from typer.testing import CliRunner

from lab.planner.points import document
from ladder_residual.cli.main import app as cli
from ladder_residual.plan.hardware import shipped
from tests.docs.pages import ROOT, commands, text_of

TEXT = text_of(ROOT / "docs" / "planning.md")


def test_every_command_of_the_text_is_one_of_the_command_line():
    for command in re.findall(r"`ladder ([a-z]+(?: [a-z]+)?)", TEXT):
        done = subprocess.run(
            [sys.executable, "-m", "ladder_residual", *command.split(), "--help"], capture_output=True, text=True
        )
        assert done.returncode == 0, command + done.stderr


def test_the_advice_shown_is_what_the_command_says():
    quoted = " ".join(line.removeprefix("> ") for line in TEXT.splitlines() if line.startswith("> "))
    result = CliRunner().invoke(cli, commands(TEXT, "bash")[0][1:])
    assert quoted in " ".join(result.output.split())


def test_the_toml_of_the_page_is_valid(tmp_path):
    block = re.search(r"```toml\n(.+?)```", TEXT, flags=re.S)[1]
    file = tmp_path / "mine.toml"
    file.write_text(block)
    hardware = shipped().extended(file)
    assert set(tomllib.loads(block)) == {"devices", "links"}
    assert hardware.link("nccl", hardware.device("mybox")).us(1024, 2) > 0


def test_commands_of_the_reproduction_page_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = text_of(ROOT / "docs" / "results" / "reproduction.md")
    found = [command for command in re.findall(r"`ladder (plan .+?)`", text) if "--model" in command]
    assert len(found) >= 3
    for command in found:
        result = CliRunner().invoke(cli, shlex.split(command))
        assert result.exit_code == 0, command + result.output + repr(result.exception)


def test_the_shipped_data_name_their_sources():
    assert "arXiv 2501.06589" in document("paper")["source"]
    readme = text_of(ROOT / "src/ladder_residual/assets/plan/README.md")
    assert "Apache License 2.0" in readme
    assert "aiconfigurator" in readme


def test_the_planned_picture_is_what_its_command_draws(tmp_path):
    (command,) = (
        words for words in commands(text_of(ROOT / "docs" / "concepts.md"), "bash") if words[1:3] == ["trace", "plan"]
    )
    result = CliRunner().invoke(cli, [*command[1:-1], str(tmp_path)])
    assert result.exit_code == 0, result.output
    committed = ROOT / "docs" / "timeline-planned.svg"
    assert committed.read_text() == (tmp_path / "timeline.svg").read_text(), command
