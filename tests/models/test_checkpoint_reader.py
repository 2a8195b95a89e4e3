"""Checkpoint directories: where their tensors lie, and what is wrong with them in one line."""

import json
import shutil
import struct

import pytest
from safetensors.torch import load_file

from ladder_residual import rewire
from ladder_residual.models.checkpoint_reader import Checkpoint, resolve
from ladder_residual.models.loading import load_model
from tests.tiny_models import tiny_model


@pytest.fixture
def saved(tmp_path):
    rewire(tiny_model("llama"), "ladder").save_pretrained(tmp_path)
    return tmp_path


def test_missing_directory_and_hub_ids(tmp_path):
    with pytest.raises(ValueError, match="no checkpoint directory at"):
        resolve(tmp_path / "nothing" / "here")
    with pytest.raises(ValueError, match="the hub cannot be reached .*: give the path of a directory, or go online"):
        resolve("nobody/nothing")  # no network in tests
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="is a file"):
        resolve(tmp_path / "file")
    with pytest.raises(ValueError, match="is a GGUF file, .* use the safetensors"):
        resolve(tmp_path / "model.gguf")


def test_a_path_is_not_taken_for_a_hub_id(saved, monkeypatch):
    """One word, or a directory that exists with something behind it: nobody asks the hub for these."""
    monkeypatch.chdir(saved.parent)
    for text in ("storis", f"{saved.name}/storis", "a b/c", "../storis", "x/y/z"):
        with pytest.raises(ValueError, match=f"no checkpoint directory at {text}.*or a hub id owner/name"):
            resolve(text)
    with pytest.raises(ValueError, match=f"did you mean '{saved.name}'"):
        resolve(saved.name + "x")


@pytest.mark.parametrize(("source", "message"), [("", "name is empty"), ("https://hf.co/a/b-1.0", "give the hub id a/b-1.0$")])
def test_what_is_no_name_of_a_checkpoint(source, message):
    with pytest.raises(ValueError, match=message):
        resolve(source)


def test_gguf_weights_are_named(saved):
    (saved / "model.safetensors").rename(saved / "model-q4.gguf")
    with pytest.raises(ValueError, match=r"only GGUF weights \(model-q4\.gguf\)"):
        Checkpoint(saved)


def test_broken_config(saved):
    (saved / "config.json").write_text("{")
    with pytest.raises(ValueError, match="not readable JSON"):
        load_model(saved)
    (saved / "config.json").write_text("[1]")
    with pytest.raises(ValueError, match="expected an object"):
        load_model(saved)
    (saved / "config.json").unlink()
    with pytest.raises(ValueError, match=r"has no config\.json"):
        load_model(saved)


def test_truncated_and_missing_weights(saved):
    weights = saved / "model.safetensors"
    data = weights.read_bytes()
    for damaged in (data[: len(data) // 2], data[:4], b"", struct.pack("<Q", 10**15) + data[8:]):
        weights.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"model\.safetensors is damaged or cut short"):
            load_model(saved)
    weights.unlink()
    with pytest.raises(ValueError, match=r"has neither model\.safetensors nor"):
        load_model(saved)
    (saved / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(ValueError, match="a pickle can run any code"):
        load_model(saved)


@pytest.mark.parametrize(
    "file",
    [
        "../secret.safetensors",
        "/etc/passwd",
        "",
        "..",
        5,
        "a/b.safetensors",
        ".bashrc.safetensors",
        "\x1b[2J.safetensors",
        "\ud800",
    ],
)
def test_an_index_may_not_lead_out_of_the_directory(saved, file):
    index = {"weight_map": {"model.norm.weight": file}}
    (saved / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="not a file of this directory"):
        Checkpoint(saved)


def test_weights_beside_an_index_that_does_not_name_them_are_refused(saved):
    """transformers loads ``model.safetensors`` where there are both."""
    shutil.copy(saved / "model.safetensors", saved / "other.safetensors")
    weight_map = dict.fromkeys(load_file(saved / "other.safetensors"), "other.safetensors")
    (saved / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ValueError, match=r"holds model\.safetensors beside an index that does not name it"):
        Checkpoint(saved)
    (saved / "model.safetensors").unlink()
    Checkpoint(saved)


def test_an_index_that_names_missing_files(saved):
    (saved / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "b.safetensors"}}))
    with pytest.raises(ValueError, match=r"names b\.safetensors, which is missing"):
        Checkpoint(saved)
    (saved / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ValueError, match="no weight_map"):
        Checkpoint(saved)
