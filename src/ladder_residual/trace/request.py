"""What can be recorded, checked without torch before any rank is started."""

from __future__ import annotations

from collections.abc import Sequence

from ..models.preflight import check_model


def check_request(
    *, source: str, layers: int | None, wirings: Sequence[str], batch: int, prompt: int, steps: int, tp: int | None
) -> None:
    """What is wrong with a request, said before any rank is started."""
    for name, number in (("steps", steps), ("batch", batch), ("prompt", prompt)):
        if number < 1:
            raise ValueError(f"--{name} must be at least 1, got {number}")
    parallel = [spec for spec in wirings if spec.lower().startswith("parallel")]
    if parallel and len(parallel) < len(wirings):
        raise ValueError("parallel layers have one norm, the others two: record parallel in a run of its own")
    if tp == 1:
        raise ValueError("there is nothing to wait for with one rank: record with --tp 2")
    check_model(source, layers=layers, wirings=wirings, tp=tp)
