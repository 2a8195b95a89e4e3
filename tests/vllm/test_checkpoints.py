"""What `ladder adapt` and `ladder train` write is served as it is; its tokens equal the package's own. Adapters are served beside
their base, plain and in fp8."""

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
from peft import PeftModel

from ladder_residual.models.loading import load_model

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
    learn = "--teacher plain --data text.txt --tokens 1024 --sequence 64 --batch-tokens 256"
    for command in (
        "ladder convert plain student --wiring ladder:1-3",
        "ladder convert student student-fp8 --quantize fp8",
        f"ladder adapt student {learn} --out recovered",
        f"ladder adapt student {learn} --out adapter --method lora --no-merge --lr 2e-2",
        f"ladder adapt student-fp8 {learn} --out adapter-fp8 --method lora --lr 2e-2",
        "ladder data prepare text.txt corpus --tokenizer plain",
        "ladder train recipe.toml",
    ):
        done = subprocess.run(
            command.split(), cwd=work, env=guide.with_programs(environment(folder, 1)), capture_output=True, text=True
        )
        assert done.returncode == 0, f"{command}\n{done.stderr[-2000:]}"
    written = {"adapt": work / "recovered", "train": work / "trained" / "export"}
    prompts = tiny.prompts(5, 17, 40)
    jobs: dict[str, Any] = {name: {"model": str(path), "prompts": prompts} for name, path in written.items()}
    adapters = {"adapter": work / "student", "adapter-fp8": work / "student-fp8"}
    for name, base in adapters.items():
        lora = {"model": str(base), "engine": {"enable_lora": True, "max_loras": 1}, "lora": str(work / name)}
        jobs |= {name: {"prompts": prompts, **lora}}
    results = run_jobs(folder, jobs)
    for name, path in written.items():
        results[name] |= {
            "expected": tiny.greedy(path, prompts),
            "wiring": json.loads((path / "config.json").read_text())["wiring"],
        }
    results["adapter"] |= {"expected": tiny.greedy(work / "adapter", prompts), "base": tiny.greedy(work / "student", prompts)}
    base = tiny.with_fp8_activations(load_model(work / "student-fp8"))
    results["adapter-fp8"]["base"] = tiny.greedy(base, prompts)
    # On top of a base whose activations are in fp8; the adapter's are not.
    results["adapter-fp8"]["expected"] = tiny.greedy(PeftModel.from_pretrained(base, str(work / "adapter-fp8")), prompts)
    return results


@pytest.mark.parametrize("writer", ["adapt", "train"])
def test_served_as_written(runs: dict[str, dict[str, Any]], writer: str) -> None:
    run = runs[writer]
    assert "error" not in run, run["error"]
    assert run["wiring"] == "ladder:1-3"
    assert run["architectures"] == ["LadderLlamaForCausalLM"]
    assert run["tokens"] == run["expected"]


@pytest.mark.parametrize(("name", "compared"), [("adapter", 24), ("adapter-fp8", 4)])
def test_adapters_beside_their_base(runs: dict[str, dict[str, Any]], name: str, compared: int) -> None:
    """Rounding an activation to fp8 may fall to either side, so only the beginning of those answers is compared."""
    run = runs[name]
    assert "error" not in run, run["error"]
    assert run["architectures"] == ["LadderLlamaForCausalLM"]
    assert run["expected"] != run["base"]
    assert [tokens[:compared] for tokens in run["tokens"]] == [tokens[:compared] for tokens in run["expected"]]
