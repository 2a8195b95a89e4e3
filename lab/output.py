"""How lab commands hand over a result."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def finish(result: dict[str, Any], out: Path | None) -> None:
    """Write the JSON to ``out`` if asked, and print it as the last line."""
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result))
