"""What `ladder adapt` and `ladder train` write is served as it is; its tokens equal the package's own."""

from __future__ import annotations

import json
import subprocess
from importlib import resources
from pathlib import Path
from typing import Any

import guide
import pytest
import tiny
from engines import environment, run_jobs

RECIPE = """
[model]
wiring = "ladder:1-3"
hidden_size = 64
intermediate_size = 128
num_layers = 4
num_heads = 4
num_kv_heads = 2
head_dim = 32
vocab_size = 512
init_std = 0.15
[data]
train = "corpus"
sequence = 256
[batch]
rows = 2
[optimizer]
lr = 5e-3
warmup = 2
[run]
steps = 4
precision = "fp32"
[checkpoint]
directory = "trained"
[log]
tensorboard = false
"""


@pytest.fixture(scope="module")
def runs(folder: Path) -> dict[str, dict[str, Any]]:
    work = folder / "writers"
    work.mkdir()
    tiny.with_tokenizer(tiny.plain(work / "plain"))
    text = resources.files("ladder_residual").joinpath("assets", "demo", "stories.txt").read_text(encoding="utf-8")
    (work / "text.txt").write_text(text[:8000], encoding="utf-8")
    (work / "recipe.toml").write_text(RECIPE, encoding="utf-8")
    for command in (
        "ladder convert plain student --wiring ladder:1-3",
        "ladder adapt student --teacher plain --data text.txt --out recovered --tokens 1024 --sequence 64 --batch-tokens 256",
        "ladder data prepare text.txt corpus --tokenizer plain",
        "ladder train recipe.toml",
    ):
        done = subprocess.run(
            command.split(), cwd=work, env=guide.with_programs(environment(folder, 1)), capture_output=True, text=True
        )
        assert done.returncode == 0, f"{command}\n{done.stderr[-2000:]}"
    written = {"adapt": work / "recovered", "train": work / "trained" / "export"}
    prompts = tiny.prompts(5, 17, 40)
    results = run_jobs(folder, {name: {"model": str(path), "prompts": prompts} for name, path in written.items()})
    for name, path in written.items():
        results[name] |= {
            "expected": tiny.greedy(path, prompts),
            "wiring": json.loads((path / "config.json").read_text())["wiring"],
        }
    return results


@pytest.mark.parametrize("writer", ["adapt", "train"])
def test_served_as_written(runs: dict[str, dict[str, Any]], writer: str) -> None:
    run = runs[writer]
    assert "error" not in run, run["error"]
    assert run["wiring"] == "ladder:1-3"
    assert run["architectures"] == ["LadderLlamaForCausalLM"]
    assert run["tokens"] == run["expected"]
