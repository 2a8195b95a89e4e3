"""Text of others on a terminal. Model text, file names and error messages may hold escape sequences, which a terminal obeys:
they move the cursor, rewrite what was printed, or set the clipboard."""

from __future__ import annotations

import logging
import re
import sys
import warnings
from typing import Any, TextIO

# C0 and C1 controls except tab and line ends, directional overrides and isolates, and halves of surrogate pairs (from file names).
_CONTROLS = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]|\r(?!\n)")


def printable(text: str) -> str:
    """``text`` with control characters written out (``\\x1b``); tabs and line ends stay."""
    return _CONTROLS.sub(lambda match: repr(match[0])[1:-1], text)


def one_line(text: str) -> str:
    return printable(" ".join(line.strip() for line in text.splitlines()))


def for_stream(text: str, stream: TextIO) -> str:
    """``printable`` on a terminal; files and pipes get every character as it is."""
    return printable(text) if stream.isatty() else text


def show(text: str, file: TextIO | None = None) -> None:
    """Print a line that may hold text of others."""
    stream = file or sys.stdout
    print(for_stream(text, stream), file=stream, flush=True)


class _PrintableRecord(logging.LogRecord):
    def getMessage(self) -> str:
        return printable(super().getMessage())


def make_messages_printable() -> None:
    """For a program's start: what libraries log, warn of or fail with quotes the files they read."""
    format_warning = warnings.formatwarning

    def formatted(message: Any, category: type[Warning], *args: Any, **kwargs: Any) -> str:
        if category is UserWarning:  # meant for whoever runs the program, who does not need the line of code
            return f"warning: {one_line(str(message))}\n"
        return printable(format_warning(message, category, *args, **kwargs))

    def show_exception(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        from traceback import format_exception

        sys.stderr.write(printable("".join(format_exception(kind, error, trace))))

    warnings.formatwarning = formatted
    logging.setLogRecordFactory(_PrintableRecord)
    sys.excepthook = show_exception
