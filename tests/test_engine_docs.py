"""The commands of docs/engine.md: known to the command line, and without a GPU either at work or refused for the lack of one."""

import re
import shlex
import sys
from pathlib import Path

import pytest

from ladder_residual.cli import main

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "engine.md"
COMMANDS = [
    line
    for block in re.findall(r"^```bash\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.S | re.M)
    for line in block.splitlines()
]
NEEDS_GPU = ("needs a GPU", "needs the CUDA engine and a GPU", "no CUDA device", "needs a CUDA device")


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_page_is_understood(command, demo_dir, monkeypatch, capfd):
    if "--tp 8" in command and "generate" in command:
        command = command.replace("--tp 8", "")  # eight processes that each say what one says
    program, *words = shlex.split(command.replace("SRC", str(demo_dir)).replace("tp=8,link=h200-nccl", "tp=2,link=h200-nccl"))
    assert program == "ladder"
    monkeypatch.setattr(sys, "argv", ["ladder", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    told = capfd.readouterr().err
    assert ended.value.code == 2
    assert any(reason in told for reason in NEEDS_GPU), told[-500:]


def test_links_of_the_page_lead_somewhere():
    for target in re.findall(r"\]\(([^)#:]+)\)", PAGE.read_text(encoding="utf-8")):
        assert (PAGE.parent / target).exists(), target
