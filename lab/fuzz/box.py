"""Where an input is tried: a box with a fresh copy of the demo checkpoint, and files around it that must keep their contents."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
from pathlib import Path
from typing import Any

# What an attacker would like to see written: start-up files, and names that the tools write themselves.
_VICTIMS = (".bashrc", "config.json", "ladder_stub.py", "model.safetensors.index.json", "tokenizer.json", "keep/notes.txt")


def fingerprint(folder: Path, without: tuple[str, ...] = ()) -> dict[str, str]:
    """Kind, mode and content of everything under ``folder``, except the entries ``without`` at its top."""
    found = {}
    for parent, folders, files in os.walk(folder):
        if Path(parent) == folder:
            folders[:] = [name for name in folders if name not in without]
        for name in folders + files:
            path = Path(parent, name)
            mode = path.lstat().st_mode
            if stat.S_ISLNK(mode):
                content = os.readlink(path)
            else:
                content = hashlib.blake2b(path.read_bytes()).hexdigest() if stat.S_ISREG(mode) else ""
            found[str(path.relative_to(folder))] = f"{mode:o} {content}"
    return found


class Box:
    """``path`` is for the input; what lies beside it in ``outside`` must not change; ``made`` keeps what is good and slow to make."""

    def __init__(self, directory: Path) -> None:
        from ladder_residual.bench.demo import demo_directory

        directory = directory.resolve()
        self.outside, self.made = directory / "outside", directory / "made"
        self.path = self.outside / "box"
        self.good = {path.name: path.read_bytes() for path in demo_directory().iterdir() if path.is_file()}
        self.made.mkdir(parents=True, exist_ok=True)
        self.restore()

    def restore(self) -> None:
        """Everything outside as it should be. The folder stays: it is the working directory."""
        self.outside.mkdir(parents=True, exist_ok=True)
        for path in self.outside.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
        for name in _VICTIMS:
            (self.outside / name).parent.mkdir(parents=True, exist_ok=True)
            (self.outside / name).write_text(f"the content of {name}\n")
        (self.outside / "secret.safetensors").write_bytes(self.good["model.safetensors"])
        self.empty()
        self.untouched = fingerprint(self.outside, without=("box",))

    def changed(self) -> list[str]:
        """What was added, removed or changed outside the box. Then all is put back."""
        now = fingerprint(self.outside, without=("box",))
        names = sorted(name for name in now.keys() | self.untouched.keys() if now.get(name) != self.untouched.get(name))
        if names:
            self.restore()
        return names

    def fresh(self, **changed: bytes | None) -> Path:
        """Empty the box and write the checkpoint into it; ``changed`` by file name, dots as ``__`` (None: without it)."""
        self.empty()
        files: dict[str, bytes | None] = {**self.good, **{name.replace("__", "."): data for name, data in changed.items()}}
        source = self.path / "checkpoint"
        source.mkdir(parents=True)
        for name, data in files.items():
            if data is not None and name not in ("stories.txt", "NOTICE.md"):
                (source / name).write_bytes(data)
        return source

    def empty(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        self.path.mkdir(parents=True)

    def json(self, name: str) -> Any:
        return json.loads(self.good[name])
