"""Every command and example in README and docs runs; every table comes from its JSON."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from ladder_residual.bench.overlap import markdown_table

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "docs" / "walkthrough.md"]
BIN = Path(sys.executable).parent


def blocks(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), re.S | re.M)


@pytest.mark.parametrize("page", [PAGES[0], pytest.param(PAGES[1], marks=pytest.mark.slow)], ids=lambda page: page.name)
def test_commands_and_examples_run(page, tmp_path):
    environment = os.environ | {"PATH": f"{BIN}:{os.environ['PATH']}", "HF_HUB_OFFLINE": "1"}
    commands = [line for block in blocks(page, "bash") for line in block.splitlines() if line.strip()]
    assert commands
    for command in commands:
        words = shlex.split(command, comments=True)
        done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, f"{command}\n{done.stdout[-1000:]}\n{done.stderr[-2000:]}"
    for example in blocks(page, "python"):
        done = subprocess.run(
            [sys.executable, "-c", example], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, f"{example}\n{done.stderr[-2000:]}"


def test_commands_in_the_text_parse():
    """Commands that take long or need a launcher are named in the text: their words must be known to the command line."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    command = re.search(r"`(ladder bench overlap[^`]*)`", text)[1]
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "ladder_residual",
            *shlex.split(command)[1:],
            "--repeats",
            "5",
            "--layers",
            "2",
            "--prompt",
            "2",
        ],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout.splitlines()[-1])["benchmark"] == "overlap"
    torchrun = re.search(r"`(torchrun [^`]*)`", text)[1]
    assert "-m ladder_residual generate" in torchrun  # run by test_generate.py


def test_tables_are_what_their_json_says():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    found = re.findall(r"<!-- table: (\S+) -->\n(.*?)<!-- end -->", text, re.S)
    assert found
    for path, table in found:
        assert table == markdown_table(json.loads((ROOT / path).read_text(encoding="utf-8"))), path


def test_what_the_readme_sums_up_is_what_the_results_say():
    def rows(path, **wanted):
        found = json.loads((ROOT / "results" / path).read_text(encoding="utf-8"))["rows"]
        return next(row for row in found if wanted.items() <= row.items())

    healed = {run["name"]: run for run in json.loads((ROOT / "results/adapt/heal.json").read_text(encoding="utf-8"))["runs"]}
    speedups = [
        rows("hosts/smollm2-135m-batch8.json", wiring="ladder", link="1 ms, 1 Gbit/s", phase="decode")["speedup"],
        rows("serve/cpu-tp2.json", wiring="ladder", rate="one")["speedup"],
        rows("train/cpu-wire-100mbit.json", wiring="ladder")["speedup"],
        rows("engine/70b-tp8-batch1.json", wiring="ladder", link="24us")["over_standard"],
    ]
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    table = text.partition("## What was measured")[2].partition("## What it is not")[0]
    assert re.findall(r"\| (\d\.\d\dx) \|", table) == [f"{speedup:.2f}x" for speedup in speedups]
    assert f"{healed['distill 30']['tokens'] / 1e6:.0f} million tokens" in table
    ordinary = rows("engine/70b-tp8-launch.json", wiring="ladder", link="24us+launch")["over_standard"]
    assert f"({ordinary:.3f}x if they are launched as NCCL's are)" in table
    fast = rows("engine/70b-tp8-batch1.json", wiring="ladder", link="5us")
    assert fast["schedule"] == "woven"
    assert f"made it {fast['over_standard']:.2f}x with emulated sums of 5 us" in text


def test_the_two_commands_of_the_readme_are_what_ci_runs():
    readme, ci = (ROOT / "README.md").read_text(encoding="utf-8"), (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    for command in ("make demo", "make test"):
        assert re.search(rf"^{command} ", readme, re.M)
        assert command in ci


def test_the_example_runs():
    done = subprocess.run([sys.executable, ROOT / "examples" / "ladder_vit.py"], capture_output=True, text=True, timeout=120)
    assert done.stdout.count("loss after 30 steps") == 3, done.stderr


def test_links_lead_somewhere():
    for page in [*PAGES, ROOT / "CONTRIBUTING.md"]:
        for target in re.findall(r"\]\(([^)#:]+)\)|src=\"([^\":]+)\"", page.read_text(encoding="utf-8")):
            path = page.parent / (target[0] or target[1])
            assert path.exists(), f"{page.name} links to {path}"
