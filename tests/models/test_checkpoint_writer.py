"""A Hugging Face directory is written whole or not at all, and replaced in one step."""

import os
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ladder_residual.models import checkpoint_writer as module
from ladder_residual.models.checkpoint_writer import check_replaceable, new_directory

CONFIG = '{{"model_type": "llama", "number": {}}}'
OLD, NEW = CONFIG.format(0), CONFIG.format(1)


@pytest.fixture
def target(tmp_path):
    with new_directory(tmp_path / "target") as directory:
        directory.write("config.json", OLD)
        directory.write("model.safetensors", "old")
    return tmp_path / "target"


@pytest.fixture(params=["swap", "two steps"])
def way(request, monkeypatch):
    """How an existing directory is replaced: swapped, or where the file system cannot do that."""
    if request.param == "two steps":
        monkeypatch.setattr(module, "swap", lambda *_: False)
    return request.param


def contents(directory):
    return {path.name: path.read_text() for path in directory.iterdir()}


def test_an_old_directory_is_replaced_as_a_whole(way, target):
    target.chmod(0o750)
    with new_directory(target, overwrite=True) as directory:
        directory.write("config.json", NEW)
        assert contents(target) == {"config.json": OLD, "model.safetensors": "old"}
    assert contents(target) == {"config.json": NEW}
    assert target.stat().st_mode & 0o777 == 0o750
    assert os.listdir(target.parent) == ["target"]


@pytest.mark.parametrize("place", ["target", "new"])
def test_a_failure_changes_nothing(way, target, place):
    def fails():
        with new_directory(target.with_name(place), overwrite=True) as directory:
            directory.write("config.json", NEW)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fails()
    assert contents(target) == {"config.json": OLD, "model.safetensors": "old"}
    assert os.listdir(target.parent) == ["target"]


@pytest.mark.parametrize("failing", [1, 2])
def test_an_interrupted_replacement_brings_the_old_one_back(target, monkeypatch, failing):
    rename, calls = Path.rename, iter(range(1, 1000))

    def interrupted(self, to):
        if next(calls) == failing:
            raise KeyboardInterrupt
        return rename(self, to)

    monkeypatch.setattr(module, "swap", lambda *_: False)
    monkeypatch.setattr(Path, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt), new_directory(target, overwrite=True) as directory:
        directory.write("config.json", NEW)
    assert contents(target) == {"config.json": OLD, "model.safetensors": "old"}
    assert os.listdir(target.parent) == ["target"]


@pytest.mark.parametrize("failing", [1, 2, 3, None])
def test_an_empty_working_directory_gets_its_config_last(tmp_path, monkeypatch, failing):
    """It must stay the same directory, so files move one by one. Killed meanwhile, it is no checkpoint; after an error it is empty."""
    here, rename, calls, seen = tmp_path / "here", Path.rename, iter(range(1, 1000)), []
    here.mkdir()
    monkeypatch.chdir(here)

    def interrupted(self, to):
        seen.append(set(os.listdir(here)))
        if next(calls) == failing:
            raise OSError("Input/output error")
        return rename(self, to)

    monkeypatch.setattr(Path, "rename", interrupted)

    def write():
        with new_directory(here) as directory:
            for name in ("config.json", "model.safetensors", "a.json"):
                directory.write(name, NEW)

    if failing is None:
        write()
        assert set(os.listdir(here)) == {"config.json", "model.safetensors", "a.json"}
    else:
        with pytest.raises(OSError, match="Input/output"):
            write()
        assert os.listdir(here) == []
    assert not any("config.json" in names for names in seen)
    assert os.listdir(tmp_path) == ["here"]


def test_a_reader_sees_the_old_directory_or_the_new_one(target):
    over, missing = threading.Event(), []

    def read():
        while not over.is_set():
            if not (target / "config.json").exists():
                missing.append(1)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    for number in range(30):
        with new_directory(target, overwrite=True) as directory:
            directory.write("config.json", CONFIG.format(number))
    over.set()
    reader.join()
    assert not missing
    assert contents(target) == {"config.json": CONFIG.format(29)}


@pytest.mark.parametrize("kind", ["link", "hard link", "file"])
def test_no_file_is_written_over_another(tmp_path, kind):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    with new_directory(tmp_path / "out") as directory:
        taken = directory.path / "taken"
        if kind == "link":
            taken.symlink_to(victim)
        elif kind == "hard link":
            assert directory.link(victim, "taken") == "linked"
        else:
            directory.write("taken", "first")
        for write in (directory.write, directory.copy, directory.link):
            with pytest.raises(FileExistsError):
                write("taken", "text") if write == directory.write else write(victim, "taken")
        directory.rewrite("taken", "replaced")
        assert not taken.is_symlink()
    assert victim.read_text() == "precious"
    assert contents(tmp_path / "out") == {"taken": "replaced"}


def test_only_checkpoints_are_overwritten(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "precious").write_text("mine")
    (tmp_path / "nested" / "inner").mkdir(parents=True)
    for name in ("nested", "package", "thesis", "git", "here"):
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "config.json").write_text("{}" if name == "package" else OLD)
    (tmp_path / "thesis" / "thesis.tex").touch()
    (tmp_path / "git" / ".env").touch()
    monkeypatch.chdir(tmp_path / "here")
    check_replaceable(tmp_path / "new", overwrite=False)
    for name, overwrite, message in (
        ("file", True, "is not a directory"),
        ("notes", False, "is not empty; choose another target or pass --overwrite"),
        ("notes", True, "no checkpoint: not overwritten"),
        ("nested", True, "holds the directory inner"),
        ("package", True, "no config.json of a model"),
        ("thesis", True, "holds thesis.tex, which is no part of a checkpoint: not overwritten"),
        ("git", True, "holds .env, which is no part of a checkpoint: not overwritten"),
        ("here", True, "the working directory, which cannot be replaced in one step: run this from another directory"),
    ):
        with pytest.raises(ValueError, match=message):
            check_replaceable(tmp_path / name, overwrite)


@pytest.mark.parametrize(("mask", "mode", "folder"), [(0o022, 0o644, 0o755), (0o027, 0o640, 0o750)])
def test_weights_are_as_readable_as_their_neighbours(tmp_path, mask, mode, folder):
    """safetensors creates its files with mode 600; a linked file is another checkpoint's too and keeps its mode."""
    source = tmp_path / "source"
    source.touch(mode=0o600)
    before = os.umask(mask)
    try:
        with new_directory(tmp_path / "target") as directory:
            directory.write("config.json", "{}")
            save_file({"a": torch.ones(1)}, directory.path / "model.safetensors")
            directory.link(source, "linked")
            directory.rewrite("config.json", "{ }")
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "target").iterdir()}
    assert modes == {"config.json": mode, "model.safetensors": mode, "linked": 0o600}
    assert (tmp_path / "target").stat().st_mode & 0o777 == folder
