"""Whether a refusal was meant.

The command line prints any ``ValueError`` as one line, so a library's own ("Expecting value: line 1 column 1") would pass for an answer
although it names neither the file nor the fix. Meant is what this package's own ``raise`` says.
"""

from __future__ import annotations

import dis
from pathlib import Path

import ladder_residual

PACKAGE = Path(ladder_residual.__file__).parent


def is_meant(error: ValueError) -> bool:
    """Raised by a ``raise`` of this package; not thrown by a library, nor by a built-in function that this package called."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return False
    code = trace.tb_frame.f_code
    raised = dis.opname[code.co_code[trace.tb_lasti]] == "RAISE_VARARGS"
    return raised and Path(code.co_filename).is_relative_to(PACKAGE)
