"""``complete.json`` of a training checkpoint, of ``train`` and of ``adapt``: its files with their sizes and checksums.

It is written last, so a checkpoint without it is not complete. Checksums find damage; forgery is left to the readers of the files.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable
from pathlib import Path, PurePosixPath
from typing import Any

from ..common.files import replace_text
from ..data.corpus import file_sha256
from ..distributed.world import World
from ..models.checkpoint_reader import INDEX_BYTES, read_json

MANIFEST = "complete.json"


def fingerprint(path: Path) -> list[Any]:
    """Size and checksum."""
    return [path.stat().st_size, file_sha256(path)]


def fingerprints(folder: Path, names: Iterable[str], world: World) -> dict[str, list[Any]]:
    """Of all ranks' files in ``folder``; all ranks call it, each with its own ``names``."""
    everyones = world.gather({name: fingerprint(folder / name) for name in names})
    return {name: entry for part in everyones for name, entry in part.items()}


def write_manifest(folder: Path, files: dict[str, list[Any]], about: dict[str, Any]) -> None:
    replace_text(folder / MANIFEST, json.dumps(about | {"files": files}))


def read_manifest(folder: Path) -> dict[str, Any]:
    """ValueError unless it is one: ``files`` names files of this folder, each with its size and checksum."""
    if not (folder / MANIFEST).exists():
        raise ValueError(f"{MANIFEST} is missing")
    manifest = read_json(folder / MANIFEST, INDEX_BYTES)
    files = manifest.get("files")
    if not isinstance(files, dict) or not files:
        raise ValueError(f"{MANIFEST} lists no files")
    for name, entry in files.items():
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or not name.isprintable():
            raise ValueError(f"{MANIFEST} leads out of its directory: {name!r:.80}")
        if not isinstance(entry, list) or [type(value) for value in entry] != [int, str]:
            raise ValueError(f"{MANIFEST} holds no size and checksum of {name:.80}")
    return manifest


def check_files(folder: Path, share: int = 0, shares: int = 1) -> str:
    """What is wrong with the files of a checkpoint, "" if nothing is: sizes of all, checksums of a share."""
    try:
        files = read_manifest(folder)["files"]
        for number, name in enumerate(sorted(files)):
            size, sha256 = files[name]
            file = folder / name
            if not file.is_file():
                return f"{name} is missing"
            if file.stat().st_size != size:
                return f"{name} has {file.stat().st_size} bytes instead of {size}"
            if number % shares == share and file_sha256(file) != sha256:
                return f"the checksum of {name} is wrong"
    except (OSError, ValueError) as error:
        return str(error)
    return ""


def newest_good(
    found: list[Path], problem_of: Callable[[Path, int, int], str], world: World
) -> tuple[Path | None, dict[Path, str]]:
    """The newest of rank 0's ``found`` (oldest first) that ``problem_of`` finds nothing wrong with, and what is wrong with newer ones.
    All ranks call it; each looks at its share of the files."""
    damaged: dict[Path, str] = {}
    for path in reversed(world.broadcast(found)):
        problem = world.first_problem(problem_of(path, world.rank, world.size) or None)
        if problem is None:
            return path, damaged
        damaged[path] = problem
    return None, damaged


def set_aside(path: Path) -> None:
    """Nothing is deleted: someone may want to know what happened to it."""
    names = (path.with_name(f"{path.name}.damaged{number or ''}") for number in itertools.count())
    path.rename(next(name for name in names if not name.exists()))


def all_damaged(folder: Path, damaged: dict[Path, str], remedy: str) -> ValueError:
    listed = "; ".join(f"{path.name}: {problem}" for path, problem in damaged.items())
    return ValueError(f"every checkpoint in {folder} is damaged ({listed}): nothing was changed. To start again, {remedy}")
