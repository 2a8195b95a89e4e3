"""One writer at a time in a directory or of a file. The kernel holds the lock, so it ends with its process, however that ends."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import warnings
from contextlib import suppress
from pathlib import Path

_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # what a file system without locks answers


class Lock:
    """Of a directory (``path/.lock``) or of a file (``.name.lock`` beside it); ValueError if another process holds it.

    Held until ``release`` or the end of a ``with`` block. The lock file names the holder; one that a killed process left behind
    is not locked and is taken over.
    """

    def __init__(self, path: Path) -> None:
        self.path, real = path, path.resolve()  # a link to a file is that file
        self._file = real / ".lock" if real.is_dir() else real.with_name(f".{real.name}.lock")
        try:
            while True:
                self._descriptor = os.open(self._file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
                self._take()
                if _names(self._file, self._descriptor):
                    break
                os.close(self._descriptor)  # its holder removed it after we had opened it
            os.ftruncate(self._descriptor, 0)
            os.write(self._descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
        except OSError as error:
            raise ValueError(f"cannot lock {path}: {error.strerror or error}") from error

    def _take(self) -> None:
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            said = os.read(self._descriptor, 200).decode(errors="replace").strip()
            os.close(self._descriptor)
            holder = said if said.isprintable() and said else "another process"
            raise ValueError(f"{self.path} is in use by {holder}: wait until it has ended, or choose another place") from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                os.close(self._descriptor)
                raise
            warnings.warn(f"the file system of {self.path} has no locks: nothing keeps a second writer away", stacklevel=4)

    def release(self) -> None:
        with suppress(OSError):
            self._file.unlink()
        os.close(self._descriptor)

    def __enter__(self) -> Lock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def _names(path: Path, descriptor: int) -> bool:
    """Whether ``path`` is still the open file."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False
