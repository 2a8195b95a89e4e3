"""What became of a run, and whether that is what the documentation says."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, field
from typing import Any

from lab.faults.watched import Traces, WatchedRun


@dataclass
class Outcome:
    fault: str
    detail: str = ""
    ended_after_s: float | None = None
    bound_s: float | None = None
    exit_codes: list[int | None] = field(default_factory=list)
    message: str = ""
    unfinished_saves: int = 0  # checkpoints that were being written; what is left of them must be gone after the next start
    wrong: list[str] = field(default_factory=list)  # empty: as documented

    @property
    def as_documented(self) -> bool:
        return not self.wrong

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "as_documented": self.as_documented}


def judge_end(
    outcome: Outcome,
    run: WatchedRun,
    held: Traces,
    *,
    bound: float,
    codes: set[int],
    error: str,
    wrong_output: str | None,
    grace: float = 10.0,
) -> Outcome:
    """Fill in an outcome after ``run.end``: ended in time, the right exit codes, a message that matches ``error``, nothing left."""
    outcome.bound_s = bound
    outcome.exit_codes = run.exit_codes()
    errors = run.errors()
    outcome.message = next((line for line in errors if re.search(error, line)), errors[0] if errors else "")
    if outcome.ended_after_s is None:
        outcome.wrong.append(f"not ended within {bound:.0f} s")
    elif not {code for code in outcome.exit_codes if code is not None} <= codes:
        outcome.wrong.append(f"exit codes {outcome.exit_codes}, expected {sorted(codes)}")
    if not re.search(error, outcome.message):
        outcome.wrong.append(f"no error that matches {error!r}; printed: {run.text()[-600:]!r}")
    if "Traceback" in run.text():
        outcome.wrong.append("a traceback was printed")
    if wrong_output:
        outcome.wrong.append(f"output: {wrong_output}")
    if outcome.ended_after_s is not None:
        outcome.wrong += [f"left behind: {thing}" for thing in run.left_over(held, grace)]
    return outcome
