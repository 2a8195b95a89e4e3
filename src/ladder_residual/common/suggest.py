"""What a misspelt name may have meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(name: object, choices: Iterable[str]) -> str:
    """`` (did you mean 'ladder'?)`` with the nearest choices, or an empty string. It goes right behind the name in a message."""
    near = [f"'{choice}'" for choice in difflib.get_close_matches(str(name).lower(), list(choices), n=3, cutoff=0.6)]
    return f" (did you mean {' or '.join(near)}?)" if near else ""
