"""An evaluation from end to end: model or scores in, one result out. ``ladder eval`` calls it."""

from __future__ import annotations

import gc
import math
import sys
import warnings
from collections.abc import Sequence
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any

from ..common.environment import environment
from ..distributed.world import World
from ..generation.tokenizer import load_tokenizer
from ..models.adapter import with_config
from ..models.checkpoint_reader import read_json
from ..models.hf_config import wiring_of
from ..models.loading import load_model
from .local import read_text
from .plan import Plan
from .requests import Request, Requests, Score, Scores
from .results import Result, compare, compare_perplexity, harness_rows
from .score import perplexity_of, score, windows_of


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
        self,
        source: str,
        tasks: Any,
        *,
        wiring: str | None = None,
        dtype: str = "auto",
        uneven: bool = False,
        allow_nonfinite: bool = False,
    ) -> Result:
        """With the model at hand."""
        tokenizer = _tokenizer(source)
        gc.collect()  # an earlier model may linger in reference cycles, and two might not fit
        model = load_model(source, self.world, wiring=wiring, dtype=dtype, uneven=uneven, allow_nonfinite=allow_nonfinite)

        def scorer(group: str, requests: Sequence[Request]) -> list[Score]:
            from tqdm import tqdm

            with tqdm(total=len(requests), desc=f"scoring {group}", disable=self.quiet) as bar:
                return score(model, requests, self.plan.batch_tokens, bar.update)

        about = {"model": source, "wiring": wiring_of(model.config).spec, "dtype": str(model.dtype).removeprefix("torch.")}
        return self._result(tokenizer, model.config, scorer, tasks, about | {"tp": self.world.size} | environment(), model)

    def requests(self, source: str, tasks: Any) -> Requests:
        """What would be asked of the model at ``source``; only its tokenizer and config are read."""
        tokenizer, config = _tokenizer(source), _config(source)
        recorded: dict[str, dict[str, Request]] = {}  # by group and key

        def record(group: str, requests: Sequence[Request]) -> list[Score]:
            recorded.setdefault(group, {}).update((request.key, request) for request in requests)
            return [Score(0.0, False)] * len(requests)

        if tasks is not None:
            self._harness(tokenizer, config, record, tasks, None)
        groups = {name: list(group.values()) for name, group in recorded.items()}
        if self.plan.perplexity:
            groups["perplexity"] = self._windows(tokenizer, self._window(config))
        names = [{"task": one.task.name, "shots": one.shots} for one in self.plan.wanted]
        return Requests(groups, {"tokenizer": source, "tasks": names, "limit": self.plan.limit})

    def from_scores(self, source: str, tasks: Any, scores: Scores, name: str = "") -> Result:
        """With scores made elsewhere; ``source`` is where the tokenizer is."""
        # What the scores do not say is not known: this machine did not make them.
        unknown = dict.fromkeys(("wiring", "dtype", "machine", "torch", "date", "commit"), "not recorded")
        made = {"model": name or source, "tp": 1, **unknown, **scores.about}
        return self._result(_tokenizer(source), _config(source), lambda _, asked: [scores[one] for one in asked], tasks, made)

    def _result(self, tokenizer: Any, config: Any, scorer: Any, tasks: Any, about: dict[str, Any], model: Any = None) -> Result:
        result: Result = {**about, "limit": self.plan.limit, "chat": self.plan.chat, "rows": [], "items": {}, "caveats": {}}
        if tasks is not None:
            raw, result["caveats"] = self._harness(tokenizer, config, scorer, tasks, model)
            result["rows"], result["items"] = harness_rows(raw, tasks.wanted)
            result["lm_eval"] = version("lm_eval")
        if self.plan.perplexity:
            window = self._window(config)
            windows = self._windows(tokenizer, window)
            result["perplexity"] = self._perplexity(windows, scorer("perplexity", windows), window)
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
        caveats = {name: list(found) for name, found in tasks.caveats.items()}
        if lm.truncated:
            text = f"{lm.truncated} requests were longer than {lm.max_length} tokens and lost the beginning of their context"
            caveats["all tasks"] = [text]
        return raw, caveats

    def _window(self, config: Any) -> tuple[int, int]:
        """Context and stride, no longer than the model's context."""
        context, limit = self.plan.context, getattr(config, "max_position_embeddings", None)
        if limit and context > limit:
            if self.world.is_main:
                warnings.warn(f"the model's context is {limit} tokens: windows hold {limit}, not {context}", stacklevel=2)
            context = limit
        return context, min(self.plan.stride, context)

    def _windows(self, tokenizer: Any, window: tuple[int, int]) -> list[Request]:
        return windows_of(tokenizer(self.text)["input_ids"], *window)

    def _perplexity(self, windows: Sequence[Request], scores: Sequence[Score], window: tuple[int, int]) -> dict[str, Any]:
        assert self.plan.perplexity is not None
        found = perplexity_of(windows, scores)
        words, size = max(1, len(self.text.split())), len(self.text.encode())
        return {
            "file": self.plan.perplexity.name,
            "context": window[0],
            "stride": window[1],
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


def load_wanted(plan: Plan) -> Any:
    """The plan's tasks, loaded; None if it has none."""
    if not plan.wanted:
        return None
    from .harness import load_tasks

    return load_tasks(plan.wanted, plan.folders, allow_code=plan.allow_code)


def _tokenizer(source: str) -> Any:
    tokenizer = load_tokenizer(source)
    tokenizer.model_max_length = sys.maxsize  # what is too long is cut where it is known why; no warning per text
    return tokenizer


def _config(source: str) -> Any:
    """The config without a model: of the file's own fields, the ones scoring needs."""
    fields = read_json(with_config(source, weights=False) / "config.json")
    return SimpleNamespace(**{key: fields.get(key) for key in ("max_position_embeddings", "vocab_size", "model_type")})
