"""A run as a Hugging Face directory."""

import json
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM

from ladder_residual.train.checkpoints import complete_checkpoints
from ladder_residual.train.dcp_checkpoint import load_tensors, save_tensors, stored_tensors
from ladder_residual.train.export import export
from ladder_residual.train.loop import open_rows
from ladder_residual.train.recipe import Recipe
from tests.forged import forge_metadata, right_checksums
from tests.tiny_training import tiny_recipe


def test_an_export_is_a_hugging_face_checkpoint(corpus, alone, tmp_path):
    export(alone["ladder"], tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert type(model).__name__ == "LadderLlamaForCausalLM"
    assert model.wiring.spec == "ladder"
    rows = open_rows(Recipe.from_dict(tiny_recipe(corpus, tmp_path)), "valid", shuffle=False)
    batch = rows.batch(0, 6)
    with torch.no_grad():
        loss = model(**batch).loss.item()
    valid = [json.loads(line) for line in (alone["ladder"] / "log.jsonl").read_text().splitlines() if '"valid"' in line]
    assert loss == pytest.approx(valid[-1]["loss"], rel=1e-5)
    with pytest.raises(ValueError, match="exists; choose another directory"):
        export(alone["ladder"], tmp_path / "out")
    with pytest.raises(ValueError, match="holds no good checkpoint"):
        export(tmp_path, tmp_path / "other")


@pytest.mark.parametrize("kind", ["pickle", "bytes"])
def test_a_forged_checkpoint_is_not_exported(kind, alone, tmp_path):
    shutil.copytree(alone["ladder"], tmp_path / "run")
    forge_metadata(complete_checkpoints(tmp_path / "run" / "checkpoints")[-1], kind, tmp_path / "marker")
    with pytest.raises(ValueError, match="no list of a checkpoint's tensors") as caught:
        export(tmp_path / "run", tmp_path / "out")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "marker").exists()
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("value", "dtype", "message"), [(float("nan"), "float32", "holds NaN"), (1e6, "float16", r"overflows as torch\.float16")]
)
def test_weights_that_are_not_finite_are_not_exported(alone, tmp_path, value, dtype, message):
    shutil.copytree(alone["ladder"], tmp_path / "run")
    newest = complete_checkpoints(tmp_path / "run" / "checkpoints")[-1]
    state = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in stored_tensors(newest).items()}
    load_tensors(state, newest, None)
    state["model.model.norm.weight"][3] = value
    for path in newest.glob("*.distcp"):
        path.unlink()
    save_tensors(state, newest, None)
    right_checksums(newest)
    with pytest.raises(ValueError, match=rf"model\.norm\.weight {message}"):
        export(tmp_path / "run", tmp_path / "out", dtype=dtype)
    assert not (tmp_path / "out").exists()
    if value == 1e6:
        export(tmp_path / "run", tmp_path / "out", dtype="bfloat16")
