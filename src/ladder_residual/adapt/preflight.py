"""What a recovery run can be refused for before torch is imported: its models, its text and its target."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..data.sources import SourceOptions, find_sources, is_hub_dataset
from ..models.convert import files_along
from ..models.preflight import check_source
from .settings import AdaptSettings


def check_settings(settings: AdaptSettings) -> None:
    """ValueError with the fix, if the run cannot begin. Only files and configs are read."""
    check_output(settings)
    check_models(settings)
    check_text(settings)


def check_output(settings: AdaptSettings) -> None:
    output = settings.output.resolve()
    for name in (settings.student, settings.teacher):
        if name is not None and Path(name).resolve() == output:
            raise ValueError(f"the result would replace {output}, which this run reads; choose another --out")
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ValueError(f"{output} exists and is not empty; choose another --out or delete it")


def check_amount(layers: int | None, budget: float | None, count: int) -> None:
    """What ``--wiring auto`` may choose of a model of ``count`` layers."""
    if layers is not None and not 1 <= layers <= count:
        raise ValueError(f"cannot convert {layers} layers of a model that has {count}; choose 1 to {count}")
    if budget is not None and not budget > 0:
        raise ValueError(f"the budget is a rise of the loss in nats, above 0; got {budget}")


def check_models(settings: AdaptSettings) -> None:
    found = check_source(settings.student)
    trained = check_source(settings.trained) if settings.control else found
    for name, model in ((settings.student, found), (settings.trained, trained)):
        if model.adapter is not None:
            raise ValueError(f"{name} is an adapter: merge it into its base (ladder convert {name} OUT), and adapt that")
    quantization = trained.quantization
    if settings.method != "lora" and quantization is not None:
        raise ValueError(
            f"{settings.trained} is quantised ({quantization.describe()}), and --method {settings.method} changes every weight: use "
            f"--method lora, which trains an adapter beside them, or adapt the model it was quantised from and quantise the result"
        )
    files_along(found.checkpoint.directory)
    student = found.fields
    context = student.get("max_position_embeddings")
    if context and settings.sequence > context:
        raise ValueError(f"sequence={settings.sequence} is longer than the model's context of {context}; use at most that")
    if settings.teacher is not None:
        check_teacher(settings, check_source(settings.teacher).fields, student)


def check_teacher(settings: AdaptSettings, teacher: Mapping[str, Any], student: Mapping[str, Any]) -> None:
    """A teacher with another vocabulary gives distributions over other words."""
    if teacher.get("vocab_size") != student.get("vocab_size"):
        raise ValueError(
            f"teacher {settings.teacher} has a vocabulary of {teacher.get('vocab_size')}, student {settings.student} one of "
            f"{student.get('vocab_size')}: distillation compares distributions over the same words"
        )
    matched = ("hidden_size", "num_hidden_layers") if settings.hidden_weight or settings.control else ()
    for name in matched:
        if teacher.get(name) != student.get(name):
            raise ValueError(
                f"matching hidden states needs models of one shape, but {name} is {teacher.get(name)} in the teacher and "
                f"{student.get(name)} in the student; use hidden_weight = 0"
            )


def check_text(settings: AdaptSettings) -> None:
    if not settings.data:
        raise ValueError("no data: give --data FILE (or owner/name of a hub dataset)")
    for name in (*(source.path for source in settings.data), *settings.heldout):
        if not is_hub_dataset(name) and not Path(name).is_dir():  # a directory is a corpus, whose reader checks it
            find_sources([name], SourceOptions())
