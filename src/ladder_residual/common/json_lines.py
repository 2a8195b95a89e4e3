"""Lines of JSON in files of others."""

from __future__ import annotations

import json
from typing import Any


def json_line(file: object, number: int, line: str) -> Any:
    """The value on line ``number`` of ``file``; a ValueError names both."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file}, line {number}: not JSON: {error}") from error
