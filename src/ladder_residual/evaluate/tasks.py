"""The paper's tasks: where the harness keeps them, the shots and metric the paper used, and the split the harness evaluates.

Any other task of the harness works too, by its name; this table is what it does not say. No torch here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ..common.suggest import did_you_mean

HARNESS_REQUIRED = "evaluation needs lm-evaluation-harness: pip install 'ladder-residual[eval]'"


@dataclass(frozen=True)
class Task:
    """A task as the harness names it."""

    name: str
    folder: str  # below lm_eval/tasks
    yaml: str  # its file there
    metric: str  # the one a table shows; all are in the JSON
    split: str = ""  # what the harness evaluates
    rows: int | None = None  # of that split
    fewshot: str = "train"  # where the harness takes examples from
    shots: int = 0  # of the paper's adaptation table
    generates: bool = False  # greedy text instead of log-probabilities
    needs: str = ""  # what to install beside the harness
    runs_code: bool = False  # that the model wrote


_CODE = "the metric code_eval (pip install evaluate; fetched from the hub on first use) and HF_ALLOW_CODE_EVAL=1"
_INSTRUCTIONS = "pip install 'lm-eval[ifeval]' and nltk's data (python -m nltk.downloader punkt_tab)"
_HUMANEVAL: dict[str, Any] = {"generates": True, "needs": _CODE, "runs_code": True}

TASKS = {
    task.name: task
    for task in (
        Task("arc_challenge", "arc", "arc_challenge.yaml", "acc_norm", "test", 1172, shots=25),
        Task("arc_easy", "arc", "arc_easy.yaml", "acc_norm", "test", 2376),
        Task("hellaswag", "hellaswag", "hellaswag.yaml", "acc_norm", "validation", 10042, shots=10),
        Task("piqa", "piqa", "piqa.yaml", "acc_norm", "validation", 1838),
        Task("sciq", "sciq", "sciq.yaml", "acc_norm", "test", 1000),
        Task("winogrande", "winogrande", "default.yaml", "acc", "validation", 1267),
        Task("openbookqa", "openbookqa", "openbookqa.yaml", "acc_norm", "test", 500),
        Task("truthfulqa_mc1", "truthfulqa", "truthfulqa_mc1.yaml", "acc", "validation", 817, fewshot="validation"),
        Task("wikitext", "wikitext", "wikitext.yaml", "word_perplexity", "test", 62),
        Task("mmlu", "mmlu/default", "_mmlu.yaml", "acc", "test", 14042, fewshot="dev", shots=5),
        Task("gsm8k", "gsm8k", "gsm8k.yaml", "exact_match (strict-match)", "test", 1319, shots=8, generates=True),
        Task("gsm8k_cot", "gsm8k", "gsm8k-cot.yaml", "exact_match (strict-match)", "test", 1319, "", 8, generates=True),
        Task("ifeval", "ifeval", "ifeval.yaml", "prompt_level_strict_acc", "train", 541, generates=True, needs=_INSTRUCTIONS),
        Task("humaneval", "humaneval", "humaneval.yaml", "pass@1 (create_test)", "test", 164, **_HUMANEVAL),
        Task("humaneval_plus", "humaneval", "humaneval_plus.yaml", "pass@1 (create_test)", "test", 164, **_HUMANEVAL),
    )
}

# From scratch: everything 0-shot, plain accuracy. Adapting: the shots above, length-normalised accuracy where there is one; GSM8K
# with the harness's eight worked examples (its scores are in the range of that variant). AlpacaEval needs a judge model.
_SCRATCH = ("arc_challenge", "arc_easy", "hellaswag", "piqa", "sciq", "winogrande", "wikitext")
_ADAPT = ("mmlu", "arc_challenge", "openbookqa", "hellaswag", "truthfulqa_mc1", "gsm8k_cot", "humaneval_plus", "ifeval")
SETS = {
    "paper-scratch": tuple(
        replace(TASKS[name], shots=0, metric=TASKS[name].metric.replace("acc_norm", "acc")) for name in _SCRATCH
    ),
    "paper-adapt": tuple(TASKS[name] for name in _ADAPT),
}


@dataclass(frozen=True)
class Wanted:
    """A task to run, and how."""

    task: Task
    shots: int | None  # None leaves it to the harness
    optional: bool = False  # part of a named set: left out with a caveat where it cannot run here


def wanted_tasks(names: str, shots: str = "paper") -> list[Wanted]:
    """``arc_easy,piqa``, ``paper-scratch``, ``arc_easy:0,mmlu:5`` ...; ``shots`` (``paper`` or a number) is for those without."""
    found: dict[str, Wanted] = {}
    common = _shots(shots)
    for part in names.split(","):
        name, colon, own = (piece.strip() for piece in part.partition(":"))
        if not name:
            raise ValueError(f"--tasks {names!r}: an empty name between commas")
        chosen = _shots(own) if colon else common
        for task in SETS.get(name, (TASKS.get(name) or Task(name, "", "", ""),)):
            if task.name in found:
                raise ValueError(f"--tasks names {task.name} twice")
            paper = task.shots if task.folder else None
            found[task.name] = Wanted(task, paper if chosen is None else chosen, optional=name in SETS)
    return list(found.values())


def _shots(text: str) -> int | None:
    if text == "paper":
        return None
    if not (text.isascii() and text.isdigit() and int(text) <= 1000):
        raise ValueError(f"shots are 'paper' or a number of examples such as 0 or 5; got {text!r:.40}")
    return int(text)


def unknown_task(name: str, known: list[str]) -> ValueError:
    """The error for a name nobody knows, with the nearest ones that somebody does."""
    papers = [*SETS, *TASKS]
    hint = did_you_mean(name, papers) or did_you_mean(name, known)
    return ValueError(f"unknown task {name!r}{hint}; the paper's are {', '.join(papers)}")
