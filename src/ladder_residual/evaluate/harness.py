"""lm-evaluation-harness with our models: its tasks, prompts and metrics; our scoring, ranks and files.

Only this file imports ``lm_eval``. Under tensor parallelism every rank runs all requests, so the harness believes in one process.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import random
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import lm_eval
import numpy as np
import torch
from lm_eval.evaluator import evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from .local import LocalTask, MissingFile, local_task
from .requests import Request, Score
from .tasks import Task, Wanted, unknown_task

BUILT_IN = Path(lm_eval.__file__).parent / "tasks"
FEWSHOT_SEED = 1234  # the harness's own default, so that examples are the ones everybody gets

Scorer = Callable[[str, Sequence[Request]], Sequence[Score]]  # group of requests ("loglikelihood", "rolling"), requests


class ScoringLM(HFLM):
    """The harness's Hugging Face model, except that log-probabilities come from ``scorer``. Without a model it only prepares
    requests or looks scores up."""

    def __init__(
        self,
        tokenizer: Any,
        config: Any,
        scorer: Scorer,
        *,
        model: Any = None,
        max_length: int,
        batch_size: int = 1,
        quiet: bool = True,
        encoded: dict[str, list[int]] | None = None,
    ) -> None:
        self.scorer, self.quiet = scorer, quiet
        self.truncated = 0  # requests that had to lose the beginning of their context
        self.encoded = encoded if encoded is not None else {}  # texts met before, by this or another model with the tokenizer
        self._group = "loglikelihood"
        with _quietly():
            super().__init__(
                pretrained=model if model is not None else SimpleNamespace(config=config, device=torch.device("cpu")),
                backend="causal",
                tokenizer=tokenizer,
                max_length=max_length,
                batch_size=batch_size,
            )

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **options: Any) -> list[int]:
        if add_special_tokens is not None or options:
            return list(super().tok_encode(string, add_special_tokens, **options))
        if string not in self.encoded:
            self.encoded[string] = list(super().tok_encode(string))
        return self.encoded[string]

    def _loglikelihood_tokens(self, requests: Any, disable_tqdm: bool = False, override_bs: int | None = None) -> Any:
        fitting = [self._fit(context, continuation) for _, context, continuation in requests]
        return [(found.logprob, found.greedy) for found in self.scorer(self._group, fitting)]

    def _fit(self, context: list[int], continuation: list[int]) -> Request:
        """As the harness does it: what is too long loses the beginning of its context."""
        if not continuation or len(continuation) > self.max_length:
            raise ValueError(
                f"an answer has {len(continuation)} tokens, the model's context is {self.max_length}; leave the task out"
            )
        surplus = len(context) + len(continuation) - (self.max_length + 1)
        if surplus > 0:
            self.truncated += 1
        return Request(context[max(0, surplus) :], continuation)

    def loglikelihood(self, requests: Any, disable_tqdm: bool = False) -> Any:
        return super().loglikelihood(requests, disable_tqdm=self.quiet)

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> Any:
        rows: int = self.batch_size
        self._group, self.batch_size_per_gpu = "rolling", sys.maxsize  # all windows in one call: the scorer makes the batches
        try:
            return super().loglikelihood_rolling(requests, disable_tqdm=self.quiet)
        finally:
            self._group, self.batch_size_per_gpu = "loglikelihood", rows

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> Any:
        if not isinstance(self.model, torch.nn.Module):
            names = ", ".join(sorted({request.task_name for request in requests}))
            raise ValueError(f"{names}: text must be generated with the model at hand; only log-probabilities travel in files")
        try:
            return super().generate_until(requests, disable_tqdm=self.quiet)
        except AssertionError as error:  # the harness's way to say that prompt and answer exceed the context
            raise ValueError(str(error)) from error


@dataclass(frozen=True)
class LoadedTasks:
    """The harness's tasks, ready to run, and what a reader of the results must know about each."""

    harness: dict[str, Any]
    wanted: list[Wanted]
    caveats: dict[str, list[str]] = field(default_factory=dict)


def load_tasks(wanted: Sequence[Wanted], folders: Sequence[Path] = (), *, allow_code: bool = False) -> LoadedTasks:
    """Tasks from the hub, or from ``folders`` if any are given."""
    caveats: dict[str, list[str]] = {}
    kept: list[Wanted] = []
    parts: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="ladder-eval-") as workdir, _quietly():
        manager = None if folders else _manager([one.task for one in wanted])
        for one in wanted:
            try:
                if one.task.runs_code and not allow_code:
                    raise _code_not_allowed(one.task.name)
                if folders:
                    local = local_task(one.task, folders, one.shots or 0)
                    loaded = _load_local(one.task, local, Path(workdir) / one.task.name)
                    caveats[one.task.name] = local.caveats
                else:
                    assert manager is not None
                    loaded = _load(manager, one.task)
                _check_judge(one.task, loaded, allow_code)
            except (MissingScorer, MissingFile) as error:
                if not one.optional:
                    raise
                caveats[one.task.name] = [f"left out: {error}"]
                continue
            _set_shots(loaded, one, caveats)
            kept.append(one)
            parts.append(loaded)
    if not kept:
        raise ValueError("none of the tasks can run here: " + "; ".join(caveat for one in caveats.values() for caveat in one))
    merged = {key: {name: value for part in parts for name, value in part[key].items()} for key in ("tasks", "groups")}
    return LoadedTasks(merged, kept, {name: found for name, found in caveats.items() if found})


class MissingScorer(ValueError):
    """A task whose answers cannot be judged here."""


def _manager(tasks: Sequence[Task]) -> TaskManager:
    if all(task.folder for task in tasks):  # reading the index of all 14,000 takes seconds
        return TaskManager(include_defaults=False, include_path=[BUILT_IN / task.folder for task in tasks])
    manager = TaskManager()
    for task in tasks:
        if task.name not in manager.all_tasks:
            raise unknown_task(task.name, manager.all_tasks)
    return manager


def _load(manager: TaskManager, task: Task) -> dict[str, Any]:
    try:
        return dict(manager.load([task.name]))
    except Exception as error:  # scorers, datasets and the hub client raise dozens of unrelated kinds
        reason = f"{type(error).__name__}: {str(error).strip()[:300]}"
        if task.needs and (isinstance(error, ImportError) or task.runs_code):
            raise MissingScorer(f"{task.name} cannot be judged here; it needs {task.needs} ({reason})") from error
        raise ValueError(
            f"cannot load {task.name}: {reason}; without a connection to the hub, --local FOLDER reads tasks from files"
        ) from error


def _load_local(task: Task, local: LocalTask, workdir: Path) -> dict[str, Any]:
    """The harness's own task with other rows: a YAML that includes it, as its guide for new tasks says."""
    workdir.mkdir()
    if task.name != "mmlu":
        _write_task(workdir, task.name, BUILT_IN / task.folder / task.yaml, local.rows, local.examples)
        return _load(TaskManager(include_defaults=False, include_path=workdir), task)
    subjects = sorted({row["subject"] for row in local.rows})
    for subject in subjects:
        built_in = BUILT_IN / task.folder / f"mmlu_{subject}.yaml"
        if "/" in subject or not built_in.is_file():
            raise ValueError(f"unknown MMLU subject {subject!r:.60}; the harness has 57, such as anatomy or world_religions")
        rows, examples = ([row for row in part if row["subject"] == subject] for part in (local.rows, local.examples))
        if local.examples and not examples:
            raise ValueError(f"the MMLU subject {subject} has rows to answer but none among the examples; use --shots 0")
        _write_task(workdir, f"mmlu_{subject}", built_in, rows, examples)
    members = [f"mmlu_{subject}" for subject in subjects]
    group = {"group": "mmlu", "task": members, "aggregate_metric_list": [{"metric": "acc", "weight_by_size": True}]}
    (workdir / "mmlu.yaml").write_text(json.dumps(group), encoding="utf-8")
    if len(subjects) < 57:
        local.caveats.append(f"{len(subjects)} of the 57 subjects")
    return _load(TaskManager(include_defaults=False, include_path=workdir), task)


def _write_task(workdir: Path, name: str, built_in: Path, rows: list[Any], examples: list[Any]) -> None:
    rows_file = workdir / f"{name}.json"
    rows_file.write_text(json.dumps({"test": rows} | ({"examples": examples} if examples else {})), encoding="utf-8")
    changed = {
        "include": str(built_in),
        "task": name,
        "dataset_kwargs": {"rows_file": str(rows_file)},
        "training_split": None,
        "validation_split": None,
        "test_split": "test",
        # Named even if it is the evaluated split: only then does the harness never show a row as its own example.
        "fewshot_split": "examples" if examples else "test",
    }
    if "gsm8k-cot" in built_in.name:
        del changed["fewshot_split"]  # its examples are part of the task
    lines = [f"{key}: {json.dumps(value)}" for key, value in changed.items()]
    lines.append("custom_dataset: !function ladder_residual.evaluate.local.harness_dataset")
    (workdir / f"{name}.yaml").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _check_judge(task: Task, loaded: dict[str, Any], allow_code: bool) -> None:
    """What the harness would find out only after hours of generating."""
    if task.name == "ifeval":
        import nltk

        try:
            nltk.data.find("tokenizers/punkt_tab")
        except LookupError as error:
            raise MissingScorer(f"ifeval cannot be judged here; it needs {task.needs}: nltk has no punkt_tab") from error
    for name, found in loaded["tasks"].items():
        if getattr(found, "UNSAFE_CODE", False) and not allow_code:
            raise _code_not_allowed(name)


def _code_not_allowed(name: str) -> MissingScorer:
    return MissingScorer(f"{name} runs the code that the model writes; allow that with --allow-code, on a machine meant for it")


def _set_shots(loaded: dict[str, Any], wanted: Wanted, caveats: dict[str, list[str]]) -> None:
    """As the harness's own command line does: a task that fixes 0 examples keeps them."""
    for found in loaded["tasks"].values():
        fixed = found.get_config("num_fewshot")
        if fixed == 0 and wanted.shots:
            caveats.setdefault(wanted.task.name, []).append(f"0 examples as its prompt is fixed, not {wanted.shots}")
        elif wanted.shots is not None or fixed is None:
            found.set_config(key="num_fewshot", value=wanted.shots or 0)


def run(
    tasks: LoadedTasks, lm: ScoringLM, *, limit: int | None, chat: bool = False, allow_code: bool = False
) -> dict[str, Any]:
    """The harness's results, on every rank."""
    random.seed(0)  # the seeds of the harness's own command line
    np.random.seed(FEWSHOT_SEED)
    torch.manual_seed(FEWSHOT_SEED)
    with _quietly(), open(os.devnull, "w", encoding="utf-8") as nowhere, contextlib.ExitStack() as stack:
        if lm.quiet:  # some of the harness's progress bars have no switch
            stack.enter_context(contextlib.redirect_stderr(nowhere))
        for task in tasks.harness["tasks"].values():
            task.set_fewshot_seed(seed=FEWSHOT_SEED)  # drawn anew for every model: the next one must get the same examples
        found = evaluate(
            lm=lm,
            task_dict=tasks.harness,
            limit=limit,
            apply_chat_template=chat,
            fewshot_as_multiturn=chat,
            confirm_run_unsafe_code=allow_code,
        )
    assert found is not None
    return dict(found)


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """The harness warns about what we do on purpose; what matters is among our caveats. Rows are read in no time: no bars for that."""
    logger = logging.getLogger("lm_eval")
    before, had_bars = logger.level, datasets.utils.are_progress_bars_disabled() is False
    logger.setLevel(logging.ERROR)
    datasets.utils.disable_progress_bars()
    try:
        with contextlib.redirect_stdout(sys.stderr):  # what scorers print must not end up in a JSON document
            yield
    finally:
        logger.setLevel(before)
        if had_bars:
            datasets.utils.enable_progress_bars()
