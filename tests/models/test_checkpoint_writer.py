"""A Hugging Face directory is written whole or not at all, and replaced in one step."""

import os
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ladder_residual.models import checkpoint_writer as module
from ladder_residual.models.checkpoint_writer import check_replaceable, new_directory


@pytest.fixture
def target(tmp_path):
    with new_directory(tmp_path / "target") as directory:
        directory.write("config.json", "old")
        directory.write("weights", "old")
    return tmp_path / "target"


@pytest.fixture(params=["swap", "files", "working directory"])
def way(request, target, monkeypatch):
    """How an existing directory is replaced: swapped, where the file system cannot swap, or because it must stay the same one."""
    if request.param == "files":
        monkeypatch.setattr(module, "swap", lambda *_: False)
    elif request.param == "working directory":
        monkeypatch.chdir(target)
    return request.param


def contents(directory):
    return {path.name: path.read_text() for path in directory.iterdir()}


def test_an_old_directory_is_replaced_as_a_whole(way, target):
    target.chmod(0o750)
    before = target.stat().st_ino
    with new_directory(target, overwrite=True) as directory:
        directory.write("config.json", "new")
        assert contents(target) == {"config.json": "old", "weights": "old"}
    assert contents(target) == {"config.json": "new"}
    assert (target.stat().st_ino == before) == (way != "swap")
    assert target.stat().st_mode & 0o777 == 0o750
    assert os.listdir(target.parent) == ["target"]


@pytest.mark.parametrize("place", ["target", "new"])
def test_a_failure_changes_nothing(way, target, place):
    def fails():
        with new_directory(target.with_name(place), overwrite=True) as directory:
            directory.write("config.json", "new")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fails()
    assert contents(target) == {"config.json": "old", "weights": "old"}
    assert os.listdir(target.parent) == ["target"]


def test_an_interrupted_move_of_files_brings_the_old_ones_back(target, monkeypatch):
    rename = Path.rename

    def interrupted(self, to):
        # The new config is about to take the place of the old one, which is aside by now.
        if Path(to) == target / "config.json" and ".old." not in str(self):
            raise KeyboardInterrupt
        return rename(self, to)

    monkeypatch.setattr(module, "swap", lambda *_: False)
    monkeypatch.setattr(Path, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt), new_directory(target, overwrite=True) as directory:
        directory.write("config.json", "new")
    assert contents(target) == {"config.json": "old", "weights": "old"}
    assert os.listdir(target.parent) == ["target"]


def test_a_reader_sees_the_old_directory_or_the_new_one(target):
    over, missing = threading.Event(), []

    def read():
        while not over.is_set():
            if not (target / "config.json").exists():
                missing.append(1)

    reader = threading.Thread(target=read)
    reader.start()
    for number in range(30):
        with new_directory(target, overwrite=True) as directory:
            directory.write("config.json", str(number))
    over.set()
    reader.join()
    assert not missing
    assert contents(target) == {"config.json": "29"}


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


def test_only_checkpoints_are_overwritten(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "precious").write_text("mine")
    (tmp_path / "nested" / "inner").mkdir(parents=True)
    (tmp_path / "nested" / "config.json").write_text("{}")
    check_replaceable(tmp_path / "new", overwrite=False)
    for name, overwrite, message in (
        ("file", True, "is not a directory"),
        ("notes", False, "is not empty; choose another target or pass --overwrite"),
        ("notes", True, "no checkpoint: not overwritten"),
        ("nested", True, "holds the directory inner"),
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
