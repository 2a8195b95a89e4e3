"""The file of completions that ``ladder generate --out`` writes, line by line, and goes on with after an interruption."""

from __future__ import annotations

import json
from pathlib import Path

from ..common.files import check_can_write


def check_new(out: Path, *, resume: bool, overwrite: bool) -> None:
    """ValueError where a file would be overwritten without having been told so, or cannot be written."""
    if out.is_dir():
        raise ValueError(f"--out {out} is a directory; give a file, such as {out / 'completions.jsonl'}")
    if not out.parent.is_dir():
        raise ValueError(f"--out {out}: there is no directory {out.parent}; make it first")
    check_can_write(out)
    if resume and overwrite:
        raise ValueError("--resume keeps what is there and --overwrite drops it: give one of them")
    if out.is_file() and out.stat().st_size and not resume and not overwrite:
        raise ValueError(f"{out} exists: pass --resume to go on with it, --overwrite to replace it, or choose another --out")


def kept_completions(out: Path, prompts: list[str]) -> int:
    """How many of the first ``prompts`` have their completion in ``out``; a last line that was cut short is removed. ValueError if
    the file is of other prompts."""
    if not out.exists():
        return 0
    with out.open("r+b") as file:
        data = file.read()
        whole = data.rfind(b"\n") + 1
        rows = data[:whole].splitlines()
        for number, line in enumerate(rows):
            try:
                prompt = json.loads(line)["prompt"]
            except (ValueError, TypeError, KeyError):
                raise ValueError(
                    f"{out}, line {number + 1} is no completion: pass --overwrite, or choose another --out"
                ) from None
            if number >= len(prompts) or prompt != prompts[number]:
                raise ValueError(
                    f"{out}, line {number + 1} is of another prompt than that of --file: pass --overwrite, or choose another --out"
                )
        file.truncate(whole)
    return len(rows)


def count_completions(out: Path) -> int:
    """Whole lines of a file that may still be written."""
    try:
        return out.read_bytes().count(b"\n")
    except OSError:
        return 0
