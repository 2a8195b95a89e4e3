"""What libraries raise about files that others wrote, as one line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ..common.terminal import one_line
from ..distributed.launch import is_out_of_memory


@contextmanager
def failures_of(what: str) -> Iterator[None]:
    """ValueError, beginning with ``what``, for whatever transformers, jinja and tokenizers raise: many unrelated kinds, and panics of
    Rust code, which lie outside ``Exception``."""
    try:
        yield
    except BaseException as error:
        panic = type(error).__name__ == "PanicException"
        if is_out_of_memory(error) or not (isinstance(error, Exception) or panic):
            raise
        raise ValueError(f"{what}: {type(error).__name__}: {one_line(str(error))[:300]}") from error
