"""What ``ladder generate`` and ``ladder chat`` do, for callers from Python.

with distributed() as world:
    session = Session("checkpoint", world, Sampling(max_new_tokens=20))
    session.load_for(["Once upon a time"])
    print(next(session.complete(["Once upon a time"])).text)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ..distributed.link_probe import reducer_for_link
from ..distributed.world import EmulatedRank, Rank, World
from ..engine.checks import check_kv_cache
from ..models.hf_config import wiring_of
from ..models.loading import load_model
from .completion import Completion, complete, complete_all, fits
from .engine_choice import with_engine
from .request import LoadOptions
from .sampling import Sampling, with_seed
from .tokenizer import chat_prompt, check_text, load_tokenizer, tokenize


class Stopwatch:
    """Tokens, and the seconds they took."""

    def __init__(self) -> None:
        self.tokens, self.seconds = 0, 0.0

    def __enter__(self) -> Stopwatch:
        self._start = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds += time.perf_counter() - self._start

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    def __str__(self) -> str:
        return f"{self.tokens} tokens in {self.seconds:.2f} s, {self.rate:.1f} tokens/s"


class Session:
    """A checkpoint on every rank of ``world``. The tokenizer is loaded first: it is small, and says early what is wrong."""

    model: Any

    def __init__(
        self, source: str | Path, world: World, sampling: Sampling | None = None, options: LoadOptions | None = None
    ) -> None:
        self.source, self.world, self.options = source, world, options or LoadOptions()
        self.emulation = self.options.emulation
        if self.emulation and world.size > 1:
            raise ValueError(f"--emulate runs in one process, here are {world.size}")
        self.tokenizer = load_tokenizer(source)
        self.sampling = with_seed(sampling or Sampling(), world)
        self.watch = Stopwatch()

    def load(self, *, batch: int, context: int) -> None:
        """Load the weights, into the CUDA engine (``batch`` sequences of ``context`` tokens) where it can compute them."""
        asked, emulation = self.options, self.emulation
        check_kv_cache(asked.kv_cache_dtype, self.world.device)
        rank: Rank = EmulatedRank(emulation.tp, device=self.world.device) if emulation else self.world
        all_reduce = reducer_for_link(self.world, small_allreduce=asked.small_allreduce, comm_dtype=asked.comm_dtype)
        model = load_model(
            self.source,
            rank,
            wiring=asked.wiring,
            dtype=asked.dtype,
            uneven=asked.uneven,
            reducer=all_reduce,
            allow_nonfinite=asked.allow_nonfinite,
            keep_quantised=asked.engine == "cuda" or emulation is not None,
            keep_act_order=False,
        )
        self.model = with_engine(
            model,
            rank,
            asked.engine,
            batch=batch,
            context=context,
            beams=self.sampling.num_beams,
            schedule=asked.schedule,
            reducer=asked.reducer,
            kv_cache_dtype=asked.kv_cache_dtype,
            link=emulation.link if emulation else None,
        )

    def load_for(self, prompts: list[str], batch_size: int = 8) -> None:
        """Load what these prompts need; they must be the same on every rank."""
        check_text(prompts)
        self.world.check_same("the prompts", repr(prompts))
        longest = max(len(ids) for ids in tokenize(self.tokenizer, prompts)["input_ids"])
        self.load(batch=min(batch_size, len(prompts)), context=longest + self.sampling.max_new_tokens)

    def complete(
        self, prompts: list[str], *, batch_size: int = 8, chat: bool = False, stream: bool = False, done: int = 0
    ) -> Iterator[Completion]:
        """Batch by batch. ``chat``: a template has written the prompts. ``stream`` prints a single prompt's text as it comes. The first
        ``done`` prompts are left out; the others get what they would have got with them."""
        completions = complete_all(
            self.model,
            self.tokenizer,
            prompts,
            self.sampling,
            self.world,
            batch_size=batch_size,
            chat=chat,
            stream=stream,
            done=done,
        )
        while True:
            with self.watch:  # the caller's own time between two completions does not count
                completion = next(completions, None)
            if completion is None:
                return
            self.watch.tokens += completion.new_tokens
            yield completion

    def chat(self, read_line: Callable[[], str], *, system: str | None = None, context: int = 8192) -> None:
        """Load, then answer rank 0's lines until an empty one; answers are printed as they come."""
        messages = [{"role": "system", "content": system}] if system else []
        first = len(messages)
        chat_prompt(self.tokenizer, [*messages, {"role": "user", "content": "?"}])  # no template: say so before loading weights
        self.load(batch=1, context=context)
        model, tokenizer, sampling = self.model, self.tokenizer, self.sampling
        for turn in range(1_000_000):
            line = self.world.ask(read_line)
            if not line:
                break
            messages.append({"role": "user", "content": line})
            while not fits(model, tokenizer, text := chat_prompt(tokenizer, messages), sampling) and len(messages) > first + 1:
                del messages[first : first + 2]  # the oldest question and its answer make room
            answer = complete(model, tokenizer, [text], sampling, self.world, stream=True, chat=True, turn=turn)[0]
            messages.append({"role": "assistant", "content": answer.text.strip()})

    def summary(self) -> str:
        """Wiring, ranks, device and speed in one line."""
        where = f"{self.emulation}, {self.world.device.type}" if self.emulation else self.world.where
        return f"[{wiring_of(self.model.config).spec}, {where}] {self.watch}"
