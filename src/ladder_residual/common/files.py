"""Files and directories that a crash leaves as they were or as they should be."""

from __future__ import annotations

import ctypes
import errno
import os
import tempfile
from pathlib import Path

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


def check_can_write(target: Path) -> None:
    """ValueError unless ``target``, a file or folder that may not exist yet, can be made here; for what is written after long work."""
    if target.exists() and not target.is_dir():  # a file or device: nothing is made beside it
        if not os.access(target, os.W_OK):
            raise ValueError(cannot_write(target, "Permission denied"))
        return
    above = target if target.is_dir() else next(path for path in target.absolute().parents if path.exists())
    if not above.is_dir():
        raise ValueError(cannot_write(target, f"{above} is not a directory"))
    try:  # not os.access(): root may do everything, except on a file system that takes nothing
        os.rmdir(tempfile.mkdtemp(prefix=".ladder-", dir=above))
    except OSError as error:
        raise ValueError(cannot_write(target, error.strerror or str(error))) from error


def cannot_write(target: Path, why: str) -> str:
    return f"cannot write {target}: {why}; choose another target"


def sync(path: Path) -> None:
    """Wait until the content of a file, or the entries of a directory, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def umask() -> int:
    """The permissions that new files of this process lack."""
    mask = os.umask(0o077)  # it can only be read by setting it; whatever is created meanwhile is private
    os.umask(mask)
    return mask


def replace_text(path: Path, text: str) -> None:
    """Write ``path`` whole or not at all. A link in its place is replaced, not followed; a device or pipe is not."""
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is no file: choose another name to write")
    descriptor, draft = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        os.fchmod(descriptor, 0o666 & ~umask())
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(descriptor)
        os.replace(draft, path)
    except BaseException:
        Path(draft).unlink(missing_ok=True)
        raise


def swap(first: Path, second: Path) -> bool:
    """Exchange two directories in one step (Linux). False where the kernel or the file system cannot."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    if renameat2(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP):
        return False
    raise OSError(code, os.strerror(code), str(first), None, str(second))
