"""What is asked of every model of an evaluation, checked before anything is loaded. No torch here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..common.fields import fields_from
from ..generation.request import check_tokenizer_files
from ..models.preflight import check_source
from .results import stored_result
from .tasks import HARNESS_REQUIRED, Wanted, wanted_tasks


@dataclass(frozen=True)
class Plan:
    """What is asked of every model."""

    wanted: Sequence[Wanted] = ()
    folders: Sequence[Path] = ()
    limit: int | None = None
    chat: bool = False
    allow_code: bool = False
    perplexity: Path | None = None
    context: int = 1024
    stride: int = 512
    max_length: int | None = None
    batch_size: int = 8
    batch_tokens: int | None = None


def check_models(
    source: str | Path, against: str | Path | None, *, tp: int, wiring: str | None, dtype: str, uneven: bool
) -> None:
    """ValueError with the fix, if a model cannot be evaluated on ``tp`` ranks; before any is started."""
    models = [(source, wiring)]
    if against is not None and stored_result(str(against)) is None:
        models.append((against, None))
    for model, its_wiring in models:
        found = check_source(model, tp=tp, wiring=its_wiring, dtype=dtype, uneven=uneven)
        check_tokenizer_files((found.adapter or found.checkpoint).directory)


def check_windows(context: int, stride: int) -> None:
    if context < 2:
        raise ValueError(f"a window needs at least 2 tokens, got a context of {context}")
    if not 1 <= stride <= context:
        raise ValueError(f"the stride must be between 1 and the context of {context}, got {stride}")


def make_plan(asked: Mapping[str, Any]) -> Plan:
    """The plan that the arguments of ``evaluate`` describe; ValueError if it has nothing to do or cannot be done here."""
    tasks, perplexity, files = asked["tasks"], asked["perplexity"], asked["files"]
    names = tasks if isinstance(tasks, str) or tasks is None else ",".join(tasks)
    wanted = wanted_tasks(names, str(asked["shots"])) if names is not None else []
    if not wanted and perplexity is None:
        raise ValueError("nothing to do: give --tasks arc_easy,piqa or --perplexity FILE")
    if perplexity is not None and not Path(perplexity).is_file():
        raise ValueError(f"cannot read {perplexity}: no such file; --perplexity takes a text file")
    check_windows(asked["context"], asked["stride"])
    if wanted and find_spec("lm_eval") is None:
        raise ValueError(HARNESS_REQUIRED)
    folders = [Path(folder) for folder in ([files] if isinstance(files, str | Path) else files)]
    text = Path(perplexity) if perplexity is not None else None
    return fields_from(Plan, {**asked, "wanted": wanted, "folders": folders, "perplexity": text})
