"""Tasks from files instead of the hub: ``<task>_<split>.jsonl`` (or .jsonl.gz, .jsonl.xz), a row a line, fields as on the hub.

Every row is checked before anything is loaded, and what differs from the harness's own data becomes a caveat, because it belongs
beside the figures. No torch here.
"""

from __future__ import annotations

import gzip
import json
import lzma
import re
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..common.json_lines import json_line
from ..common.suggest import did_you_mean
from .rows import CONVERTERS, pages_of
from .tasks import Task

_SPLITS = {"val": "validation", "valid": "validation"}  # the others are called in files as on the hub
_STEMS = {
    "winogrande": ("winogrande", "winogrande_xl"),
    "truthfulqa_mc1": ("truthfulqa_mc1", "truthfulqa_mc"),
    "humaneval_plus": ("humaneval_plus", "humanevalplus"),
    "gsm8k_cot": ("gsm8k",),
    "wikitext": ("wikitext", "wikitext2"),
}
_NAME = re.compile(r"(?P<stem>.+?)(?:_(?P<split>train|val|valid|validation|dev|test)\d*)?\.(?:jsonl|raw|txt)(?:\.gz|\.xz)?")

Row = dict[str, Any]


class MissingFile(ValueError):
    """A folder has nothing for a task."""


@dataclass(frozen=True)
class LocalTask:
    """Rows to evaluate, rows to take examples from (none: the same), and what a reader of the result must know."""

    name: str
    rows: list[Row]
    examples: list[Row]
    caveats: list[str] = field(default_factory=list)


def local_task(task: Task, folders: Sequence[Path], shots: int) -> LocalTask:
    """The task's rows from the first folder that has them."""
    if task.name not in CONVERTERS:
        hint = did_you_mean(task.name, CONVERTERS)
        raise ValueError(
            f"the task {task.name!r} cannot be read from files (--local){hint}; those that can: {', '.join(CONVERTERS)}"
        )
    files = _files(task, folders)
    split = task.split if task.split in files else next((s for s in ("test", "validation", "dev") if s in files), None)
    if split is None:
        where, ending = ", ".join(map(str, folders)), "val" if task.split == "validation" else task.split
        raise MissingFile(
            f"no file for task {task.name} in {where}: expected {_stems(task)[0]}_{ending}.jsonl "
            "(or .jsonl.gz, .jsonl.xz); name the folder that has it with another --local"
        )
    rows, caveats = read_rows(files[split], task.name), []
    if split != task.split:
        caveats.append(f"{split} rows ({files[split].name}) instead of the harness's {task.split} split")
    elif task.rows is not None and len(rows) != task.rows:
        caveats.append(f"{len(rows)} of the {task.rows} rows of the {split} split")
    examples: list[Row] = []
    if shots and task.fewshot:
        order = (task.fewshot, "train", "dev", "validation", "test")
        pool = next(s for s in order if s in files)
        if pool != split:
            examples = read_rows(files[pool], task.name)
        if pool != task.fewshot:
            same = ", never the row itself" if pool == split else ""
            caveats.append(f"examples from {pool} rows{same}; the harness takes them from {task.fewshot}")
    return LocalTask(task.name, rows, examples, caveats)


def _stems(task: Task) -> tuple[str, ...]:
    return _STEMS.get(task.name, (task.name,))


def _files(task: Task, folders: Sequence[Path]) -> dict[str, Path]:
    """Split -> file; an earlier folder wins."""
    found: dict[str, Path] = {}
    for folder in folders:
        if not folder.is_dir():
            raise ValueError(f"--local {folder} is not a folder")
        here: dict[str, Path] = {}
        for path in sorted(folder.iterdir()):
            match = _NAME.fullmatch(path.name)
            if match is None or match["stem"] not in _stems(task):
                continue
            split = _SPLITS.get(match["split"], match["split"]) if match["split"] else task.split
            if split in here:
                raise ValueError(f"{here[split]} and {path.name} are both {split} rows of {task.name}; leave one of them there")
            here[split] = path
        found = here | found
    return found


def read_text(path: Path) -> str:
    """A text file, unpacked if its name ends in .gz or .xz."""
    openers: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".xz": lzma.open}
    opener = openers.get(path.suffix, open)
    try:
        with opener(path, "rt", encoding="utf-8", newline="") as file:
            return str(file.read())
    except (OSError, EOFError, lzma.LZMAError, zlib.error, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read {path}: {error}") from error


def read_rows(path: Path, task: str) -> list[Row]:
    """Rows as the harness expects them. A row that is not so is named by its line."""
    text = read_text(path)
    if not path.name.removesuffix(".gz").removesuffix(".xz").endswith(".jsonl"):
        if task != "wikitext":
            raise ValueError(f"{path}: rows of {task} come as .jsonl, one JSON object a line")
        return pages_of(text)
    rows: list[Row] = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        row = json_line(path, number, line)
        if not isinstance(row, dict):
            raise ValueError(f"{path}, line {number}: expected a JSON object, found a {type(row).__name__}")
        try:
            rows.append(CONVERTERS[task](row))
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: not a row of {task}: {error}") from error
    if not rows:
        raise ValueError(f"{path} holds no row")
    return rows


def harness_dataset(rows_file: str, **_: Any) -> Any:
    """What the harness calls for a task whose rows were written to ``rows_file``: its splits."""
    from datasets import Dataset

    splits = json.loads(Path(rows_file).read_text(encoding="utf-8"))
    return {name: Dataset.from_list(rows) for name, rows in splits.items()}
