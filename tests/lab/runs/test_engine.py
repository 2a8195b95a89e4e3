"""Runs behind the committed results: what of them needs no GPU."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch

from lab.runs import engine_real_checkpoint, engine_sizes
from ladder_residual.engine.spec import EngineSpec, RankSizes
from ladder_residual.models.presets import presets


@pytest.mark.parametrize(("ends", "worst"), [(2, 3.0), ([2, 0], 0.0)])
def test_the_judge_of_tokens_may_not_end_a_text_either(ends, worst) -> None:
    """After one word of prompt the second token, 1, was chosen; without its end tokens the judge would choose 0 or the same."""

    class Judge:
        generation_config = SimpleNamespace(eos_token_id=ends)

        def __call__(self, input_ids, **_):
            return SimpleNamespace(logits=torch.tensor([4.0, 1.0, 9.0]).repeat(*input_ids.shape, 1))

    sequences = torch.tensor([[0, 1], [0, 1]])
    found = engine_real_checkpoint.regret(Judge(), sequences, torch.ones_like(sequences), 1)
    assert found.tolist() == [[worst], [worst]]


def test_the_control_of_tokens_compares_transformers_with_itself(demo_dir, tmp_path, monkeypatch) -> None:
    command = ["engine_real_checkpoint.py", str(demo_dir), "--control", "--wirings", "ladder", "--dtypes", "float32"]
    monkeypatch.setattr("sys.argv", [*command, "--at-once", "3", "--out", str(tmp_path)])
    engine_real_checkpoint.main()
    (file,) = tmp_path.glob("*-batch3-control.json")
    result = json.loads(file.read_text())
    (row,) = result["rows"]
    assert (row["tokens"], row["equal_tokens"]) == (384, 384)
    assert row["eager_float32_agrees"] == row["torch_float32_agrees"] == 1
    assert result["control"] is True


def test_models_named_in_runs_exist() -> None:
    for name, tp in engine_sizes.MODELS:
        RankSizes.of(presets()[name], tp, tp - 1)
        EngineSpec.from_shape(presets()[name])
