"""The commands of docs/operations.md and docs/security.md run: the long ones with less to do, and the same words otherwise."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from ladder_residual.bench.delayed_link import why_not
from ladder_residual.demo import demo_directory

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "docs" / "operations.md", ROOT / "docs" / "security.md"]
COMMANDS = [
    line
    for page in PAGES
    for block in re.findall(r"^```bash\n(.*?)^```", page.read_text(encoding="utf-8"), re.S | re.M)
    for line in block.splitlines()
    if line.strip()
]
# By the third word of a command: what to say instead, so that it takes seconds.
SHORTER = {
    "faults": {"--rounds": "0", "--named": "version"},
    "soak": {"--requests": "60"},
    "fuzz": {"--inputs": "18", "--workers": "1"},
    "hosts": {"--repeats": "5", "--layers": "2", "--prompt": "4", "--prefill-prompt": "4", "--phases": "decode"},
}


def shortened(command, directory):
    """The command's words, less to do, and its results in ``directory``."""
    words = shlex.split(command)
    for name, value in SHORTER.get(words[2], {}).items():
        words = [*words, name, value]  # the last one counts
    if "--links" in words:
        words[words.index("--links") + 1] = "1ms/1gbit"
    words = ["smollm2-135m" if word == "smollm2" else word for word in words]  # the shape, where the checkpoint was not fetched
    return [str(directory / word) if word.startswith(("results/", "docs/")) else word for word in words]


def test_the_pages_name_every_command_of_theirs():
    named = {shlex.split(command)[2] for command in COMMANDS}
    assert named == {"link", "faults", "soak", "hosts", "hosts-report", "fuzz"}


def run(words):
    return subprocess.run(
        [sys.executable, "-m", "ladder_residual", *words[1:]], capture_output=True, text=True, timeout=500, env=os.environ
    )


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: " ".join(shlex.split(command)[2:5]))
def test_commands_run(command, tmp_path):
    words = shortened(command, tmp_path)
    if words[2] == "hosts" and why_not():
        pytest.skip(f"no link can be made here: {why_not()}")
    (tmp_path / "results" / "hosts").mkdir(parents=True)
    (tmp_path / "docs").mkdir()
    done = run(words)
    assert done.returncode == 0, f"{' '.join(words)}\n{done.stdout[-1500:]}\n{done.stderr[-1500:]}"
    if "--out" in words:
        written = Path(words[words.index("--out") + 1])
        if written.suffix == ".json":
            assert json.loads(written.read_text()) == json.loads(done.stdout.splitlines()[-1])
        else:
            assert written.read_text().startswith("# Across hosts")


def test_the_torchrun_commands_are_those_that_are_tested():
    """Both are run by test_faults.py and test_bench_hosts.py, over namespaces; here: their words are known to the command line."""
    text = PAGES[0].read_text(encoding="utf-8")
    assert text.count("-m ladder_residual generate DIR --prompt") == 2
    assert "--max-restarts 3 -m ladder_residual train recipe.toml" in text
    done = run(
        ["ladder", "generate", str(demo_directory()), "--prompt", "Once", "-n", "1", "--wire", "bf16", "--exchange", "measured"]
    )
    assert done.returncode == 0, done.stderr
