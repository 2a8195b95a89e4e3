"""Checkpoints that were made to do harm: nothing outside the target changes, nothing runs, nothing wrong goes through."""

import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from ladder_residual.models.checkpoint_reader import Checkpoint
from ladder_residual.models.convert import convert
from ladder_residual.models.inspect import inspect_checkpoint
from ladder_residual.models.loading import load_model
from tests.tiny_models import tiny_model


@pytest.fixture
def plain(tmp_path):
    tiny_model("llama").save_pretrained(tmp_path / "plain")
    (tmp_path / "plain" / "tokenizer.json").write_text("{}")
    return tmp_path / "plain"


def tree(directory):
    """Every file below, by name and content."""
    return {str(path.relative_to(directory)): path.read_bytes() for path in sorted(directory.rglob("*")) if path.is_file()}


def index_of(plain, **elsewhere):
    """Replace the single file by an index; ``elsewhere`` maps tensors to other files."""
    names = load_file(plain / "model.safetensors").keys()
    weight_map = dict.fromkeys(names, "model.safetensors") | elsewhere
    (plain / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


@pytest.mark.parametrize("name", ["ladder_stub.py", "config.json", "tokenizer.json", "generation_config.json"])
@pytest.mark.parametrize("link", ["symbolic", "hard", "none"])
def test_an_index_cannot_make_convert_write_through_a_link(plain, tmp_path, name, link):
    victim = tmp_path / "victim"
    victim.write_text((plain / "config.json").read_text() if name == "config.json" else "precious")
    before = victim.read_bytes()
    (plain / name).unlink(missing_ok=True)
    if link == "symbolic":
        (plain / name).symlink_to(victim)
    elif link == "hard":
        os.link(victim, plain / name)
    else:
        shutil.copy(victim, plain / name)
    index_of(plain, extra=name)
    with pytest.raises(ValueError, match=r"safetensors|leaves|link"):
        convert(plain, tmp_path / "out", "ladder")
    assert victim.read_bytes() == before
    assert not (tmp_path / "out").exists()


HOW = pytest.mark.parametrize("how", [{}, {"quantize": "fp8"}, {"refitted": {}}], ids=["linked", "quantised", "refitted"])


@HOW
@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "config.json"])
def test_links_that_leave_the_source_are_refused(plain, tmp_path, name, how):
    outside = tmp_path / "outside"
    shutil.move(plain / name, outside)
    (plain / name).symlink_to(outside)
    before = outside.read_bytes()
    with pytest.raises(ValueError, match=name):
        convert(plain, tmp_path / "out", "ladder", **how)
    assert outside.read_bytes() == before
    assert not (tmp_path / "out").exists()


def test_a_snapshot_of_the_hub_cache_is_a_source(plain, tmp_path):
    """The hub client keeps files in blobs/ and links them from snapshots/."""
    repository = tmp_path / "hub" / "models--owner--name"
    snapshot, blobs = repository / "snapshots" / "abc", repository / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for path in list(plain.iterdir()):
        shutil.move(path, blobs / path.name)
        (snapshot / path.name).symlink_to(f"../../blobs/{path.name}")
    done = convert(snapshot, tmp_path / "out", "ladder")
    assert load_model(done.target).config.wiring == "ladder"
    assert not any(path.is_symlink() for path in done.target.iterdir())


@HOW
def test_what_is_not_part_of_a_model_stays_behind(plain, tmp_path, how):
    for name in ("modeling_evil.py", "setup.sh", ".env", ".bashrc", "run.exe", "LICENSE.py", "NOTICE.so"):
        (plain / name).write_text("x")
    kept = convert(plain, tmp_path / "out", "ladder", **how).kept
    assert kept == ["generation_config.json", "tokenizer.json"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "config.json",
        "generation_config.json",
        "ladder_stub.py",
        "model.safetensors",
        "tokenizer.json",
    ]


def truncated(plain):
    data = (plain / "model.safetensors").read_bytes()
    (plain / "model.safetensors").write_bytes(data[: len(data) // 2])


def change_weights(change):
    def apply(plain):
        tensors = load_file(plain / "model.safetensors")
        change(tensors)
        save_file(tensors, plain / "model.safetensors", {"format": "pt"})

    return apply


def shorter(tensors):
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name] = tensors[name][:-1].contiguous()


def renamed(tensors):
    tensors["model.layers.1.mlp.other.weight"] = tensors.pop("model.layers.1.mlp.up_proj.weight")


def whole_numbers(tensors):
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name] = tensors[name].to(torch.int32)


DAMAGE = {
    "truncated": truncated,
    "shape": change_weights(shorter),
    "name": change_weights(renamed),
    "dtype": change_weights(whole_numbers),
}


@pytest.mark.parametrize("read", [convert, inspect_checkpoint, load_model], ids=["convert", "inspect", "load"])
@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_refused_by_all_readers_alike(plain, tmp_path, damage, read):
    DAMAGE[damage](plain)
    arguments = (plain, tmp_path / "out", "ladder") if read is convert else (plain,)
    with pytest.raises(ValueError, match=r"safetensors|up_proj"):
        read(*arguments)
    assert not (tmp_path / "out").exists()


KILLED_AT = """
import os, signal, sys
from ladder_residual.models.convert import convert

left = int(sys.argv[3])

def dying(call):
    def instead(*arguments, **options):
        global left
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*arguments, **options)
    return instead

for name in ("rename", "replace", "unlink", "rmdir", "remove", "link"):
    setattr(os, name, dying(getattr(os, name)))
from ladder_residual.models import checkpoint_writer as files
files.swap = dying(files.swap) if sys.argv[4] == "swap" else lambda *_: False
convert(sys.argv[1], sys.argv[2], "ladder", overwrite=True)
print("done")
"""


@pytest.mark.slow
@pytest.mark.parametrize("way", ["swap", "two steps"])
def test_a_kill_while_overwriting_leaves_the_old_or_the_new_checkpoint(plain, tmp_path, way):
    """Where directories cannot be swapped, the target is missing at one moment, and the old one lies beside it."""
    target, missing = tmp_path / "out", 0
    convert(plain, target, "standard")
    old = tree(target)
    convert(plain, tmp_path / "new", "ladder")
    new = tree(tmp_path / "new")
    for kills in range(200):
        shutil.rmtree(target)
        convert(plain, target, "standard")
        done = subprocess.run(
            [sys.executable, "-c", KILLED_AT, plain, target, str(kills), way], capture_output=True, text=True, timeout=120
        )
        if way == "two steps" and not target.exists():
            (aside,) = tmp_path.glob(".out.old.*")
            aside.rename(target)
            missing += 1
        assert tree(target) in (old, new), f"killed at call {kills}"
        for rest in tmp_path.glob(".out*"):
            shutil.rmtree(rest)
        if "done" in done.stdout:
            break
    assert "done" in done.stdout
    assert kills >= 1
    assert missing == (way != "swap")
    assert tree(target) == new


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_that_are_no_numbers_are_refused_by_name(plain, tmp_path, value, dtype):
    name = "model.layers.2.self_attn.k_proj.weight"

    def poison(tensors):
        for key in tensors:
            tensors[key] = tensors[key].to(dtype)
        tensors[name][3, 5] = value

    change_weights(poison)(plain)
    with pytest.raises(ValueError, match=rf"{name}.*allow-nonfinite"):
        load_model(plain)
    assert load_model(plain, allow_nonfinite=True) is not None


def test_refitted_weights_that_are_no_numbers_are_not_written(plain, tmp_path):
    name = "model.layers.1.mlp.up_proj.weight"
    refitted = {name: torch.full_like(load_file(plain / "model.safetensors")[name], float("nan"))}
    with pytest.raises(ValueError, match=f"{name} holds NaN or infinite"):
        convert(plain, tmp_path / "out", "ladder", refitted=refitted)
    assert not (tmp_path / "out").exists()


def test_weights_that_overflow_in_the_dtype_asked_for_are_refused(plain):
    def enlarge(tensors):
        tensors["model.layers.0.mlp.up_proj.weight"][0, 0] = 1e6

    change_weights(enlarge)(plain)
    load_model(plain)
    with pytest.raises(ValueError, match=r"layers\.0\.mlp\.up_proj\.weight overflows as torch\.float16"):
        load_model(plain, dtype="float16")


def test_a_header_longer_than_its_file_is_refused_before_memory_is_asked_for(plain, monkeypatch):
    monkeypatch.setattr("ladder_residual.models.checkpoint_reader.DIGEST_WHOLE_BYTES", 0)
    checkpoint = Checkpoint(plain)
    data = (plain / "model.safetensors").read_bytes()
    (plain / "model.safetensors").write_bytes((1 << 60).to_bytes(8, "little") + data[8:])
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged"):
        checkpoint.digest()


@pytest.mark.parametrize("said", [True, None], ids=["said", "by default"])
@pytest.mark.parametrize("read", [convert, inspect_checkpoint, load_model], ids=["convert", "inspect", "load"])
def test_a_stored_head_that_differs_from_the_embedding_it_is_tied_to_is_refused(tmp_path, monkeypatch, said, read):
    monkeypatch.setattr("ladder_residual.models.checkpoint_reader.BLOCK_BYTES", 100)
    source = tmp_path / "plain"
    tiny_model("gemma", tie_word_embeddings=True).save_pretrained(source)
    config = json.loads((source / "config.json").read_text())
    if said is None:
        del config["tie_word_embeddings"]
    (source / "config.json").write_text(json.dumps(config))
    arguments = (source, tmp_path / "out", "ladder") if read is convert else (source,)

    def store_head(change):
        def apply(tensors):
            tensors["lm_head.weight"] = change(tensors["model.embed_tokens.weight"].clone())

        change_weights(apply)(source)

    store_head(lambda table: table)  # an equal copy is fine
    read(*arguments)
    shutil.rmtree(tmp_path / "out", ignore_errors=True)
    for change in (
        lambda table: table + torch.eye(*table.shape) * 1e-3,
        lambda table: table.double(),
        lambda table: table[:-1],
    ):
        store_head(change)
        with pytest.raises(
            ValueError, match=r"lm_head\.weight differs from model\.embed_tokens\.weight.*tie_word_embeddings: false"
        ):
            read(*arguments)
        assert not (tmp_path / "out").exists()
