"""The writer of Hugging Face directories that every command uses: they appear whole or not at all.

with new_directory(target, overwrite=True) as directory:
    directory.write("config.json", text)
    model.save_pretrained(directory.path)
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ..common.files import cannot_write, check_can_write, replace_text, swap, sync, umask
from .checkpoint_reader import CONFIG, HEADS, INDEX, Checkpoint, read_json
from .hf_config import STUB

if TYPE_CHECKING:
    from torch import Tensor

# Anything else may be somebody's work, and is not overwritten.
_PART_OF_A_CHECKPOINT = re.compile(
    rf"[^.].*\.(?:json|jinja|model|tiktoken|txt|md|safetensors)|selection\.svg|{re.escape(STUB)}|LICENSE|NOTICE|\.gitattributes",
    re.DOTALL,
)


class DirectoryWriter:
    """The directory in the making. Every file is created anew: a name that is taken, also by a link, is an error."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, name: str, text: str) -> None:
        with (self.path / name).open("x", encoding="utf-8") as file:
            file.write(text)

    def rewrite(self, name: str, text: str) -> None:
        """Replace a file that a library has written."""
        replace_text(self.path / name, text)

    def write_tensors(self, name: str, tensors: dict[str, Tensor]) -> None:
        from safetensors.torch import save_file

        save_file(tensors, self.path / name, metadata={"format": "pt"})

    def write_index(self, files: Mapping[str, str], total_bytes: int) -> None:
        """Which file holds each tensor, where there is more than one file."""
        self.write(INDEX, json.dumps({"metadata": {"total_size": total_bytes}, "weight_map": files}, indent=1))

    def copy(self, source: Path, name: str) -> str:
        (self.path / name).open("xb").close()
        shutil.copyfile(source, self.path / name)
        return "copied"

    def link(self, source: Path, name: str) -> str:
        """A hard link, or a copy where the file system has no links or is another one."""
        try:
            os.link(source.resolve(), self.path / name)
        except FileExistsError:
            raise
        except OSError:
            return self.copy(source, name)
        return "linked"


def rewrite_weights(
    checkpoint: Checkpoint, directory: DirectoryWriter, change: Callable[[str, Tensor], Mapping[str, Tensor]]
) -> tuple[int, int]:
    """The files of ``checkpoint`` with what ``change`` makes of each tensor, one file after the other: bytes before and after."""
    where: dict[str, str] = {}
    before = after = 0
    for file in sorted({checkpoint.file_of(name) for name in checkpoint.names}):
        tensors: dict[str, Tensor] = {}
        for name in [name for name in checkpoint.names if checkpoint.file_of(name) == file]:
            buffer = checkpoint.is_computed(name) and not name.endswith(HEADS)  # of any dtype: it is no weight
            tensor = checkpoint.read_stored(name, None) if buffer else checkpoint.read(name)
            before += tensor.nbytes
            changed = {name: tensor} if buffer else change(name, tensor)
            tensors |= {part: value.contiguous() for part, value in changed.items()}
        directory.write_tensors(file, tensors)
        after += sum(tensor.nbytes for tensor in tensors.values())
        where |= dict.fromkeys(tensors, file)
    if (checkpoint.directory / INDEX).exists():
        directory.write_index(where, after)
    return before, after


@contextmanager
def new_directory(target: str | Path, *, overwrite: bool = False) -> Iterator[DirectoryWriter]:
    """``target`` gets what the block writes, when the block ends. If it fails, ``target`` stays as it was."""
    target = Path(target).resolve()
    check_replaceable(target, overwrite)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    except OSError as error:
        raise ValueError(cannot_write(target, error.strerror or str(error))) from error
    try:
        yield DirectoryWriter(draft)
        mask = umask()
        for path in draft.iterdir():
            if path.stat().st_nlink == 1:  # only the owner can read what safetensors writes; a linked one has its own mode
                path.chmod(0o666 & ~mask)
            sync(path)
        sync(draft)
        check_replaceable(target, overwrite)  # the block may have taken hours
        draft.chmod(target.stat().st_mode if target.exists() else 0o777 & ~mask)
        _put_in_place(draft, target)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    sync(target.parent)


def check_replaceable(target: Path, overwrite: bool) -> None:
    """ValueError unless ``target`` is new or empty, or a checkpoint that may be overwritten."""
    if not target.exists():
        check_can_write(target)
        return
    if not target.is_dir():
        raise ValueError(f"{target} exists and is not a directory; choose another target")
    there = sorted(target.iterdir())
    if not there:
        return
    if not overwrite:
        raise ValueError(f"{target} is not empty; choose another target or pass --overwrite")
    if target.samefile(os.curdir):
        raise ValueError(
            f"{target} is the working directory, which cannot be replaced in one step: run this from another directory"
        )
    if not _says_what_model(target / CONFIG):
        raise ValueError(f"{target} holds files but no config.json of a model, so it is no checkpoint: not overwritten")
    for path in there:
        if path.is_dir() and not path.is_symlink():
            raise ValueError(f"{target} holds the directory {path.name}, which is no part of a checkpoint: not overwritten")
        if not _PART_OF_A_CHECKPOINT.fullmatch(path.name):
            raise ValueError(f"{target} holds {path.name}, which is no part of a checkpoint: not overwritten")


def _says_what_model(config: Path) -> bool:
    try:
        return "model_type" in read_json(config)
    except ValueError:
        return False


def _put_in_place(draft: Path, target: Path) -> None:
    if not target.exists():
        draft.rename(target)
    elif target.samefile(os.curdir):
        _move_files(draft, target)
    elif swap(draft, target):
        shutil.rmtree(draft)  # the old files
    else:
        _replace_in_two_steps(draft, target)


def _move_files(draft: Path, target: Path) -> None:
    """Into an empty working directory, which must stay the same one: ``config.json``, without which it is no checkpoint, comes last."""
    moved: list[Path] = []
    try:
        for path in sorted(draft.iterdir(), key=lambda path: path.name == CONFIG):
            path.rename(target / path.name)
            moved.append(target / path.name)
    except BaseException:
        for path in reversed(moved):
            path.unlink()
        raise
    draft.rmdir()


def _replace_in_two_steps(draft: Path, target: Path) -> None:
    """Where directories cannot be swapped. Between the steps the target is missing, and the old one lies whole beside it."""
    aside = Path(tempfile.mkdtemp(prefix=f".{target.name}.old.", dir=target.parent))
    try:
        target.rename(aside)
        draft.rename(target)
    except BaseException:
        if target.exists():
            aside.rmdir()
        else:
            aside.rename(target)
        raise
    shutil.rmtree(aside)
