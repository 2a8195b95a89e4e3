"""An evaluation from end to end: model or scores in, one result out. ``command.py`` is its face on the command line."""

from __future__ import annotations

import gc
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..bench.environment import environment
from ..checkpoint import read_json, resolve
from ..generate import load_tokenizer
from ..hf_config import wiring_of
from ..loading import load_model
from ..parallel import World
from .local import read_text
from .requests import Request, Requests, Score, Scores
from .results import Result, compare, compare_perplexity, harness_rows, load
from .score import perplexity_of, score, windows_of
from .tasks import HARNESS_REQUIRED, Wanted


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


class Session:
    """Tasks loaded once, asked of one model after the other."""

    def __init__(self, plan: Plan, world: World) -> None:
        self.plan, self.world = plan, world
        self.quiet = not (world.is_main and sys.stderr.isatty())
        self.encoded: dict[str, dict[str, list[int]]] = {}  # by tokenizer
        self.text = read_text(plan.perplexity) if plan.perplexity else ""
        if plan.perplexity and not self.text.strip():
            raise ValueError(f"{plan.perplexity} holds no text")

    def evaluate(
        self, source: str, tasks: Any, *, wiring: str | None = None, dtype: str = "auto", uneven: bool = False
    ) -> Result:
        """With the model at hand."""
        tokenizer = _tokenizer(source)
        gc.collect()  # an earlier model may linger in reference cycles, and two might not fit
        model = load_model(source, self.world, wiring=wiring, dtype=dtype, uneven=uneven)

        def scorer(group: str, requests: Sequence[Request]) -> list[Score]:
            from tqdm import tqdm

            with tqdm(total=len(requests), desc=f"scoring {group}", disable=self.quiet) as bar:
                return score(model, requests, self.plan.batch_tokens, bar.update)

        about = {"model": source, "wiring": wiring_of(model.config).spec, "dtype": str(model.dtype).removeprefix("torch.")}
        return self._result(tokenizer, model.config, scorer, tasks, about | {"tp": self.world.size} | environment(), model)

    def requests(self, source: str, tasks: Any) -> Requests:
        """What would be asked of the model at ``source``; only its tokenizer and config are read."""
        tokenizer, config = _tokenizer(source), _config(source)
        recorded: dict[str, list[Request]] = {}
        if tasks is not None:
            from .harness import Recorder

            recorder = Recorder()
            self._harness(tokenizer, config, recorder, tasks, None)
            recorded = recorder.requests({}).groups
        if self.plan.perplexity:
            recorded["perplexity"] = self._windows(tokenizer)
        names = [{"task": one.task.name, "shots": one.shots} for one in self.plan.wanted]
        return Requests(recorded, {"tokenizer": source, "tasks": names, "limit": self.plan.limit})

    def from_scores(self, source: str, tasks: Any, scores: Scores, name: str = "") -> Result:
        """With scores made elsewhere; ``source`` is where the tokenizer is."""
        unknown = dict.fromkeys(
            ("wiring", "dtype", "machine", "torch", "date", "commit"), "not recorded"
        )  # never this machine's
        made = {"model": name or source, "tp": 1, **unknown, **scores.about}
        return self._result(_tokenizer(source), _config(source), lambda _, asked: [scores[one] for one in asked], tasks, made)

    def _result(self, tokenizer: Any, config: Any, scorer: Any, tasks: Any, about: dict[str, Any], model: Any = None) -> Result:
        result: Result = {**about, "limit": self.plan.limit, "chat": self.plan.chat, "rows": [], "items": {}, "notes": {}}
        if tasks is not None:
            raw, notes = self._harness(tokenizer, config, scorer, tasks, model)
            result["rows"], result["items"] = harness_rows(raw, tasks.wanted)
            result["notes"] = notes
            result["lm_eval"] = _harness_version()
        if self.plan.perplexity:
            windows = self._windows(tokenizer)
            result["perplexity"] = self._perplexity(windows, scorer("perplexity", windows))
        return result

    def _harness(self, tokenizer: Any, config: Any, scorer: Any, tasks: Any, model: Any) -> tuple[Any, dict[str, list[str]]]:
        from .harness import ScoringLM, run

        plan, limit = self.plan, getattr(config, "max_position_embeddings", None) or 2048
        lm = ScoringLM(
            tokenizer,
            config,
            scorer,
            model=model,
            max_length=min(plan.max_length or limit, limit),
            batch_size=plan.batch_size,
            quiet=self.quiet,
            encoded=self.encoded.setdefault(tokenizer.name_or_path, {}),
        )
        raw = run(tasks, lm, limit=plan.limit, chat=plan.chat, allow_code=plan.allow_code)
        notes = {name: list(found) for name, found in tasks.notes.items()}
        if lm.truncated:
            text = f"{lm.truncated} requests were longer than {lm.max_length} tokens and lost the beginning of their context"
            notes["all tasks"] = [text]
        return raw, notes

    def _windows(self, tokenizer: Any) -> list[Request]:
        return windows_of(tokenizer(self.text)["input_ids"], self.plan.context, self.plan.stride)

    def _perplexity(self, windows: Sequence[Request], scores: Sequence[Score]) -> dict[str, Any]:
        assert self.plan.perplexity is not None
        found = perplexity_of(windows, scores)
        words, size = max(1, len(self.text.split())), len(self.text.encode())
        return {
            "file": self.plan.perplexity.name,
            "context": self.plan.context,
            "stride": self.plan.stride,
            "tokens": found.tokens,
            "nats_per_token": found.nats_per_token,
            "ppl": found.ppl,
            "words": words,
            "word_ppl": math.exp(min(found.nats / words, 700.0)),
            "bits_per_byte": found.nats / size / math.log(2),
            "windows": [[tokens, round(nats, 4)] for tokens, nats in found.windows],
        }


def with_comparison(ours: Result, theirs: Result) -> Result:
    """The result, with the other model's figures and the differences in it."""
    keys = ("model", "wiring", "dtype", "tp", "commit", "date", "rows", "perplexity")
    return {
        **ours,
        "against": {key: theirs[key] for key in keys if key in theirs},
        "comparison": compare(ours, theirs),
        "perplexity_comparison": compare_perplexity(ours, theirs),
    }


def stored_result(source: str) -> Result | None:
    """``--against`` takes an earlier evaluation too."""
    return load(source) if source.endswith(".json") and Path(source).is_file() else None


def check_harness() -> None:
    from importlib.util import find_spec

    if find_spec("lm_eval") is None:
        raise ValueError(HARNESS_REQUIRED)


def _harness_version() -> str:
    from importlib.metadata import version

    return version("lm_eval")


def _tokenizer(source: str) -> Any:
    tokenizer = load_tokenizer(source)
    tokenizer.model_max_length = sys.maxsize  # what is too long is cut where it is known why; no warning per text
    return tokenizer


def _config(source: str) -> Any:
    """The config without a model: of the file's own fields, the ones scoring needs."""
    from types import SimpleNamespace

    fields = read_json(resolve(source, weights=False) / "config.json")
    known = {key: fields.get(key) for key in ("max_position_embeddings", "vocab_size", "model_type")}
    return SimpleNamespace(**known)
