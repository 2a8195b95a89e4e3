import json
import os
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM

from ladder_residual import rewire
from ladder_residual.models.convert import convert
from ladder_residual.models.loading import load_model
from tests.tiny_models import random_ids, tiny_model


@pytest.fixture
def plain(tmp_path):
    model = tiny_model("qwen3")
    model.save_pretrained(tmp_path / "plain")
    (tmp_path / "plain" / "tokenizer.json").write_text("{}")
    (tmp_path / "plain" / "chat_template.jinja").write_text("hello")
    (tmp_path / "plain" / "old.bin").write_bytes(b"pickle")
    return tmp_path / "plain"


def test_there_and_back(plain, tmp_path):
    done = convert(plain, tmp_path / "ladder", "ladder:last-half")
    assert done.after.spec == "ladder:2-3"
    assert done.placed == "linked"
    assert (tmp_path / "ladder" / "model.safetensors").samefile(plain / "model.safetensors")
    assert (tmp_path / "ladder" / "chat_template.jinja").read_text() == "hello"
    assert (tmp_path / "ladder" / "generation_config.json").exists()
    assert not (tmp_path / "ladder" / "old.bin").exists()
    config = json.loads((tmp_path / "ladder" / "config.json").read_text())
    assert config["model_type"] == "ladder_qwen3"
    assert config["wiring"] == "ladder:2-3"
    # What transformers loads is what rewiring in memory gives.
    expected = rewire(tiny_model("qwen3"), "ladder:last-half")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "ladder").eval()
    with torch.no_grad():
        assert torch.equal(loaded(random_ids()).logits, expected(random_ids()).logits)
    # The way back gives the original config, key for key, and nothing of ours.
    convert(tmp_path / "ladder", tmp_path / "back", "standard", copy=True)
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == json.loads((plain / "config.json").read_text())
    assert not (tmp_path / "back" / "ladder_stub.py").exists()
    assert not (tmp_path / "back" / "model.safetensors").samefile(plain / "model.safetensors")


def test_back_from_a_model_that_save_pretrained_wrote(tmp_path):
    rewire(tiny_model("mixtral"), "ladder").save_pretrained(tmp_path / "ladder")
    convert(tmp_path / "ladder", tmp_path / "back", "standard")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "back").eval()
    assert type(model).__name__ == "MixtralForCausalLM"
    with torch.no_grad():
        torch.testing.assert_close(model(random_ids()).logits, tiny_model("mixtral")(random_ids()).logits)


def test_the_authors_checkpoints_convert(plain, tmp_path):
    config = json.loads((plain / "config.json").read_text()) | {"ladder_layers": 1}
    (plain / "config.json").write_text(json.dumps(config))
    assert load_model(plain).wiring.spec == "ladder:3"
    done = convert(plain, tmp_path / "ours", "ladder:2-3")
    assert done.before.spec == "ladder:3"
    assert "ladder_layers" not in json.loads((tmp_path / "ours" / "config.json").read_text())


def test_bad_targets_lose_nothing(plain, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="same directory"):
        convert(plain, plain, "ladder")
    target = tmp_path / "target"
    target.mkdir()
    (target / "precious").write_text("mine")
    with pytest.raises(ValueError, match="not empty"):
        convert(plain, target, "ladder")
    with pytest.raises(ValueError, match="not overwritten"):
        convert(plain, target, "ladder", overwrite=True)
    assert (target / "precious").read_text() == "mine"
    convert(plain, tmp_path / "again", "ladder")
    with pytest.raises(ValueError, match="layer 9"):
        convert(plain, tmp_path / "again", "ladder:9", overwrite=True)
    assert json.loads((tmp_path / "again" / "config.json").read_text())["wiring"] == "ladder"
    convert(plain, tmp_path / "again", "ladder:0", overwrite=True)
    assert json.loads((tmp_path / "again" / "config.json").read_text())["wiring"] == "ladder:0"
    with pytest.raises(ValueError, match="one norm"):
        convert(plain, tmp_path / "parallel", "parallel")
    # Into the current directory, which has a name only once it is resolved.
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    convert(plain, ".", "ladder")
    with pytest.raises(ValueError, match="run this from another directory"):
        convert(plain, ".", "ladder:1", overwrite=True)
    assert json.loads((tmp_path / "here" / "config.json").read_text())["wiring"] == "ladder"
    # A directory that holds the source, or anything a checkpoint does not, is not deleted.
    convert(plain, tmp_path / "again" / "inner", "ladder")
    with pytest.raises(ValueError, match="contains the source"):
        convert(tmp_path / "again" / "inner", tmp_path / "again", "standard", overwrite=True)
    with pytest.raises(ValueError, match="holds the directory inner"):
        convert(plain, tmp_path / "again", "standard", overwrite=True)
    assert (tmp_path / "again" / "inner" / "config.json").exists()
    monkeypatch.chdir(tmp_path)
    shutil.rmtree(tmp_path / "here")
    shutil.rmtree(tmp_path / "again" / "inner")
    assert sorted(os.listdir(tmp_path)) == ["again", "plain", "target"]  # and no scratch directory
