"""The scripts behind the committed results run: the same plans, on the shipped model and a CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from ladder_residual.data.encoder import Encoder
from ladder_residual.data.packing import build_rows
from ladder_residual.data.tokenizer import read_tokenizer
from tests.docs.pages import ROOT


def run_script(plan, demo_dir, tmp_path, asked):
    """``lab/runs/adapt_smollm2.py`` on the shipped model and a CPU: the same plan, a few hundred tokens instead of millions."""
    encoder = Encoder(read_tokenizer(demo_dir), 512)
    (tmp_path / "stories.txt").write_text((demo_dir / "stories.txt").read_text(encoding="utf-8"), encoding="utf-8")
    ids = build_rows(str(tmp_path / "stories.txt"), encoder, 64, tmp_path / "made").ids.astype(np.uint16)
    (tmp_path / "rows").mkdir()
    for name, part in (("books", ids[:80]), ("books_heldout", ids[80:112]), ("wikitext2", ids[112:144])):
        np.save(tmp_path / "rows" / f"{name}.npy", part)
    for name, part in (("gsm8k", ids[40:80]), ("reference", ids[20:60])):
        np.save(tmp_path / "rows" / f"{name}.npy", part)
    words = [plan, "--model", str(demo_dir), "--rows", str(tmp_path / "rows"), "--work", str(tmp_path / "work")]
    words += (
        f"--device cpu --no-compile --million 64 --batch 64 --length 64 --rows-per-step 16 --out {tmp_path / 'out'}".split()
    )
    for name in asked:
        words += ["--run", name]
    done = subprocess.run(
        [sys.executable, "-m", "lab.runs.adapt_smollm2", *words, "--seconds", "240"],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    document = json.loads((tmp_path / "out" / f"{plan}.json").read_text(encoding="utf-8"))
    return document, {run["name"]: run for run in document["runs"]}


@pytest.mark.slow
def test_next_token_runs_are_measured_against_the_original_too(demo_dir, tmp_path):
    asked = [f"{method} 15 adamw, seed 1" for method in ("distill", "sft")]
    _, runs = run_script("pairs", demo_dir, tmp_path, asked)
    assert list(runs) == asked
    distilled, plain = (runs[name] for name in asked)
    assert distilled["to_original"]["wikitext2"] == pytest.approx(distilled["after"]["wikitext2"]["kl"], rel=1e-3)
    assert plain["to_original"]["wikitext2"] > 0.01
    assert "kl" not in plain["after"]["wikitext2"]  # its own measure has no teacher


@pytest.mark.slow
def test_the_script_behind_the_results_runs(demo_dir, tmp_path):
    short = "distill 15 chosen, 4M"
    ends = ("", ", fine-tuned teacher", ", fine-tuned teacher alone, seed 2")
    asked = [*(short + end for end in ends), "distill 20 chosen, fine-tuned teacher", "lora 15, 4M", "sft 15 muon, 4M"]
    asked += ["distill 15 chosen, own samples", "progressive 30, 4M"]
    document, runs = run_script("recovery", demo_dir, tmp_path, asked)
    assert next(iter(runs)) == "control sft, 4M"
    assert set(runs) == {"control sft, 4M", *asked}
    assert runs["distill 15 chosen, own samples"]["settings"]["data"][0]["path"] == "samples"
    same = [runs[short + end]["before"]["wikitext2"]["loss"] for end in ends]
    assert max(same) == min(same)  # zero-shot is the original's weights, whatever ran before and whoever teaches
    assert all(run["problem"] is None for run in document["runs"])
    assert document["original"]["wikitext2"]["loss"] > 0
