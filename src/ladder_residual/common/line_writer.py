"""Results written line by line, so that whatever happens later keeps them."""

from __future__ import annotations

import os
from pathlib import Path

from .terminal import show


class LineWriter:
    """Writes whole lines to ``path`` (None: standard output), behind those that are there with ``append``. A line that does not fit
    on the disk is taken back."""

    def __init__(self, path: Path | None, *, append: bool = False) -> None:
        self.path = path
        try:
            self._file = None if path is None else path.open("ab" if append else "wb", buffering=0)
        except OSError as error:
            raise ValueError(f"cannot write {path}: {error.strerror}") from error

    def write(self, line: str) -> None:
        if self._file is None:
            show(line)
            return
        data = memoryview((line + "\n").encode("utf-8"))
        begin = self._file.tell() if self._file.seekable() else None
        try:
            while data:
                data = data[self._file.write(data) :]
        except OSError as error:
            if begin is not None:
                self._file.truncate(begin)
            raise ValueError(f"cannot write {self.path}: {error.strerror}; the lines before are there") from error

    def __enter__(self) -> LineWriter:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()


def silent() -> LineWriter:
    """For ranks that have nothing to say."""
    return LineWriter(Path(os.devnull))
