"""One row of each task: checked, and brought into the shape the harness expects. No torch here."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

Row = dict[str, Any]


def _text(row: Row, *names: str) -> Row:
    for name in names:
        if not isinstance(row.get(name), str):
            raise ValueError(f"{name} is {row[name]!r:.60}, expected text" if name in row else f"it has no {name}")
    return {name: row[name] for name in names}


def _texts(value: Any, name: str, least: int = 2) -> list[str]:
    if not isinstance(value, list) or len(value) < least or not all(isinstance(item, str) and item for item in value):
        raise ValueError(f"{name} is {value!r:.60}, expected a list of at least {least} texts")
    return value


def _index(row: Row, name: str, size: int) -> int:
    value = row.get(name)
    if isinstance(value, str) and value.isascii() and value.isdigit():
        value = int(value)
    if type(value) is not int or not 0 <= value < size:
        raise ValueError(f"{name} is {row.get(name)!r:.60}, expected a number from 0 to {size - 1}")
    return value


def _plain(*names: str) -> Callable[[Row], Row]:
    """Rows of texts alone."""
    return lambda row: _text(row, *names)


def _lettered(question: str) -> Callable[[Row], Row]:
    """ARC and OpenBookQA: choices with labels, the right label as ``answerKey``."""

    def convert(row: Row) -> Row:
        choices = row.get("choices")
        if not isinstance(choices, dict):
            raise ValueError('choices must be {"text": [...], "label": [...]}')
        texts, labels = _texts(choices.get("text"), "choices.text"), _texts(choices.get("label"), "choices.label")
        found = _text(row, question, "answerKey")
        if len(texts) != len(labels) or found["answerKey"].strip() not in labels:
            raise ValueError(
                f"answerKey {found['answerKey']!r:.20} and {len(texts)} choices do not fit the labels {labels!r:.60}"
            )
        return found | {"choices": {"text": texts, "label": labels}}

    return convert


def _hellaswag(row: Row) -> Row:
    endings = _texts(row.get("endings"), "endings")
    label = str(_index(row, "label", len(endings)))  # text, as on the hub
    return _text(row, "activity_label", "ctx_a", "ctx_b") | {"endings": endings, "label": label}


def _piqa(row: Row) -> Row:
    return _text(row, "goal", "sol1", "sol2") | {"label": _index(row, "label", 2)}


def _winogrande(row: Row) -> Row:
    found = _text(row, "sentence", "option1", "option2", "answer")
    if "_" not in found["sentence"]:
        raise ValueError("its sentence has no _ to fill in")
    if found["answer"] not in ("1", "2"):
        raise ValueError(f'answer is {found["answer"]!r:.20}, expected "1" or "2"')
    return found


def _truthfulqa(row: Row) -> Row:
    """The right answer first, as the harness expects it. The original file has {answer: 0 or 1}, the hub two lists."""
    targets = row.get("mc1_targets")
    if isinstance(targets, dict) and isinstance(targets.get("choices"), list) and isinstance(targets.get("labels"), list):
        pairs = list(zip(targets["choices"], targets["labels"], strict=False))
    elif isinstance(targets, dict):
        pairs = list(targets.items())
    else:
        raise ValueError("mc1_targets must be {answer: 0 or 1}")
    if [label for _, label in pairs if label not in (0, 1)] or sum(label for _, label in pairs) != 1:
        raise ValueError("mc1_targets must mark exactly one answer with 1 and the others with 0")
    pairs.sort(key=lambda pair: -pair[1])
    choices = _texts([choice for choice, _ in pairs], "mc1_targets")
    return _text(row, "question") | {"mc1_targets": {"choices": choices, "labels": [1] + [0] * (len(choices) - 1)}}


def _mmlu(row: Row) -> Row:
    choices = _texts(row.get("choices"), "choices", 4)
    return _text(row, "question", "subject") | {"choices": choices, "answer": _index(row, "answer", 4)}


def _gsm8k(row: Row) -> Row:
    found = _text(row, "question", "answer")
    if "####" not in found["answer"]:
        raise ValueError("its answer has no final '#### number'")
    return found


def _ifeval(row: Row) -> Row:
    names, options = _texts(row.get("instruction_id_list"), "instruction_id_list", 1), row.get("kwargs")
    if not isinstance(options, list) or len(options) != len(names) or not all(isinstance(one, dict) for one in options):
        raise ValueError(f"kwargs must be a list of {len(names)} objects, one for each instruction")
    if type(row.get("key")) is not int:
        raise ValueError(f"key is {row.get('key')!r:.20}, expected a number")
    return _text(row, "prompt") | {"key": row["key"], "instruction_id_list": names, "kwargs": options}


_HUMANEVAL = _plain("task_id", "prompt", "canonical_solution", "test", "entry_point")
CONVERTERS: dict[str, Callable[[Row], Row]] = {
    "arc_challenge": _lettered("question"),
    "arc_easy": _lettered("question"),
    "hellaswag": _hellaswag,
    "piqa": _piqa,
    "sciq": _plain("question", "support", "distractor1", "distractor2", "distractor3", "correct_answer"),
    "winogrande": _winogrande,
    "openbookqa": _lettered("question_stem"),
    "truthfulqa_mc1": _truthfulqa,
    "wikitext": _plain("page"),
    "mmlu": _mmlu,
    "gsm8k": _gsm8k,
    "gsm8k_cot": _gsm8k,
    "ifeval": _ifeval,
    "humaneval": _HUMANEVAL,
    "humaneval_plus": _HUMANEVAL,
}


def pages_of(text: str) -> list[Row]:
    """The articles of a raw WikiText file: each begins with a heading of the first level, `` = Title = ``."""
    heading = re.compile(r"(?m)^(?= = [^=].*[^=] = \n)")
    pages = [page for page in heading.split(text) if page.strip()]
    return [{"page": page} for page in pages]
