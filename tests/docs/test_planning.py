"""The commands of docs/planning.md run, and its numbers are what the commands print."""

import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from ladder_residual.plan.commands import app as plan_app
from ladder_residual.plan.hardware import shipped
from ladder_residual.plan.points import document
from ladder_residual.plan.report_commands import report, reproduction
from ladder_residual.plan.trace_commands import trace_app

TEXT = (Path(__file__).parents[1] / "docs" / "planning.md").read_text()
COMMANDS = [line for block in re.findall(r"^```bash\n(.*?)^```", TEXT, flags=re.S | re.M) for line in block.splitlines()]

cli = typer.Typer()
cli.add_typer(plan_app, name="plan")
cli.add_typer(trace_app, name="trace")
cli.command("report")(report)
cli.command("reproduction")(reproduction)


@pytest.mark.slow
def test_the_commands_of_the_page_run_in_their_order(tmp_path):
    """As a reader types them: in one folder, each finding what those before it wrote."""
    assert len(COMMANDS) >= 12
    for command in COMMANDS:
        program, *words = shlex.split(command)
        assert program == "ladder"
        done = subprocess.run(
            [sys.executable, "-m", "ladder_residual", *words], cwd=tmp_path, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, f"{command}\n{done.stdout[-1000:]}\n{done.stderr[-2000:]}"
    for file in ("my-host.toml", "planned/timeline.svg", "recorded/trace.json", "recorded/timeline.svg", "report.html"):
        assert (tmp_path / file).stat().st_size > 0


def test_every_command_of_the_text_is_one_of_the_command_line():
    for command in re.findall(r"`ladder ([a-z]+(?: [a-z]+)?)", TEXT):
        done = subprocess.run(
            [sys.executable, "-m", "ladder_residual", *command.split(), "--help"], capture_output=True, text=True
        )
        assert done.returncode == 0, command + done.stderr


def test_the_advice_shown_is_what_the_command_says():
    quoted = re.search(r"^> (.+)$", TEXT, flags=re.M)[1]
    result = CliRunner().invoke(cli, shlex.split(COMMANDS[0])[1:])
    assert quoted in result.output


def test_the_toml_of_the_page_is_valid(tmp_path):
    block = re.search(r"```toml\n(.+?)```", TEXT, flags=re.S)[1]
    file = tmp_path / "mine.toml"
    file.write_text(block)
    hardware = shipped().extended(file)
    assert set(tomllib.loads(block)) == {"devices", "links"}
    assert hardware.link("nccl", hardware.device("mybox")).us(1024, 2) > 0


def test_commands_of_the_reproduction_page_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = (Path(__file__).parents[1] / "docs" / "reproduction.md").read_text()
    commands = [c for c in re.findall(r"`ladder (plan .+?)`", text) if "refit" not in c and "(" not in c]
    assert len(commands) >= 4
    for command in commands:
        result = CliRunner().invoke(cli, shlex.split(command))
        assert result.exit_code == 0, command + result.output + repr(result.exception)


def test_the_shipped_data_name_their_sources():
    assert "arXiv 2501.06589" in document("paper")["source"]
    readme = (Path(__file__).parents[1] / "src/ladder_residual/data/plan/README.md").read_text()
    assert "Apache License 2.0" in readme
    assert "aiconfigurator" in readme


def test_the_planned_picture_is_what_its_command_draws(tmp_path):
    command = next(line for line in COMMANDS if line.startswith("ladder trace plan"))
    result = CliRunner().invoke(cli, [*shlex.split(command)[1:-1], str(tmp_path)])
    assert result.exit_code == 0, result.output
    committed = Path(__file__).parents[1] / "docs" / "timeline-planned.svg"
    assert committed.read_text() == (tmp_path / "timeline.svg").read_text(), command
