import os
from pathlib import Path

import pytest

from ladder_residual.common import files
from ladder_residual.common.files import check_can_write, replace_text, swap


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch):
    victim, path = tmp_path / "victim", tmp_path / "file"
    victim.write_text("precious")
    path.symlink_to(victim)
    replace_text(path, "new")
    assert (victim.read_text(), path.read_text(), path.is_symlink()) == ("precious", "new", False)
    assert path.stat().st_mode & 0o777 == 0o644

    def full(*_):
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="disk full"):
        replace_text(path, "newer")
    assert path.read_text() == "new"
    assert sorted(os.listdir(tmp_path)) == ["file", "victim"]


def test_directories_are_swapped(tmp_path, monkeypatch):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    if swap(tmp_path / "a", tmp_path / "b"):
        assert (os.listdir(tmp_path / "a"), os.listdir(tmp_path / "b")) == (["b"], ["a"])
        with pytest.raises(FileNotFoundError):
            swap(tmp_path / "a", tmp_path / "missing")
    monkeypatch.setattr(files.ctypes, "CDLL", lambda *_, **__: object())
    assert not swap(tmp_path / "a", tmp_path / "b")


def test_where_nothing_can_be_written(tmp_path):
    check_can_write(tmp_path)
    check_can_write(tmp_path / "new" / "deep" / "file.json")
    (tmp_path / "file").touch()
    check_can_write(tmp_path / "file")
    check_can_write(Path(os.devnull))
    with pytest.raises(ValueError, match="file/below: .*file is not a directory; choose another target"):
        check_can_write(tmp_path / "file" / "below")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
