"""Every file of ``examples/`` runs, and the notebook shows what its cells print."""

import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from lab.tools.notebook import execute, stored_outputs

FOLDER = Path(__file__).parents[1] / "examples"
NOTEBOOK = json.loads((FOLDER / "quickstart.ipynb").read_text(encoding="utf-8"))
slow = pytest.mark.slow
SCRIPTS = {
    "plan_machine": r"Convert llama-3-70b \(tp 8, nccl, batch 1\): ladder on all 80 layers gives 1\.",
    "convert_checkpoint": r"standard -> ladder:3-4  \|\|\|##\nLadderLlamaForCausalLM ladder:3-4\nLadderLlamaForCausalLM ladder\n",
    "select_layers": r"chosen   ladder:\d,\d \(2 layers\)",
    "evaluate_model": r"perplexity 4\.\d\d -> 5\.\d\d\n\+0\.\d+ ± 0\.\d+ nats per token",
    "adapt_model": r"20 steps, 20,480 tokens\nheldout.txt: loss 2\.7\d -> 2\.[0-5]\d nats",
    "generate_text": r"tp 1: (.+)\ntp 1: (.+)\ntp 2: \1\ntp 2: \2\n",
}
TAKES_LONG = ("adapt_model", "generate_text")


@pytest.mark.parametrize("name", [pytest.param(name, marks=[slow] if name in TAKES_LONG else []) for name in SCRIPTS])
def test_a_script_runs(name, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [f"{name}.py"])
    runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
    assert re.search(SCRIPTS[name], capsys.readouterr().out)
    assert not list(tmp_path.iterdir())  # what it wrote is gone


@slow
def test_a_script_of_your_own_runs_under_torchrun(tmp_path):
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--redirects",
        "1",
    ]  # a file each: one pipe mixes
    command += ["--log-dir", "logs", FOLDER / "tensor_parallel.py"]
    done = subprocess.run(command, cwd=tmp_path, env=os.environ, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr[-2000:]
    said = dict(
        re.findall(
            r"rank (\d) of 2: 130,368 weights, next token (.+)",
            done.stdout + "".join(file.read_text() for file in tmp_path.rglob("stdout.log")),
        )
    )
    assert set(said) == {"0", "1"}
    assert said["0"] == said["1"]


@slow
def test_the_notebook_shows_what_its_cells_print(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert execute(NOTEBOOK) == stored_outputs(NOTEBOOK)


def test_the_notebook_reads_well_where_nobody_runs_it():
    shown = "".join(stored_outputs(NOTEBOOK))
    assert len(shown.splitlines()) > 15
    assert not re.search(r"/(tmp|home|root|work|Users)/|Error|Warning", shown)


def test_every_file_is_tested_and_listed():
    scripts = {path.stem for path in FOLDER.glob("*.py")}
    assert scripts == {*SCRIPTS, "tensor_parallel", "ladder_vit"}  # the last: tests/docs/test_readme.py
    listed = set(re.findall(r"^\| \[(.+?)\]", (FOLDER / "README.md").read_text(encoding="utf-8"), re.M))
    assert listed == {f"{name}.py" for name in scripts} | {"quickstart.ipynb"}
