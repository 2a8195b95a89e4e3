"""``ladder data sample``: a model's own samples, as text to train it on where there is no other.

``plain`` rows begin as documents do; ``chat`` rows let an instruction-tuned model write the user's turn itself, after the
template's header, and then its answer. Every batch is on disk before the next one begins.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TextIO

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from ..common.memory import free_bytes
from ..distributed.world import World
from ..models.adapter import with_config
from ..models.checkpoint_reader import read_json
from ..models.loading import load_model
from ..models.presets import ModelShape
from .batched_sampling import ATTENTION, EMPTY, WINDOW, BatchedSampler, Start, register_attention
from .sample_settings import SampleSettings
from .tokenizer import ChatForm, end_of_document, first_token, read_tokenizer, stop_tokens, tokenizer_digest, vocabulary_size

_OWN_ATTENTION = ("attn_logit_softcapping",)  # in config.json: grouped attention would leave it out


@dataclass(frozen=True)
class Memory:
    """Bytes a batch needs beside the weights."""

    cache: int
    work: int  # logits and what sampling makes of them

    @classmethod
    def predicted(cls, model: Any, settings: SampleSettings) -> Memory:
        shape = ModelShape.from_hf(model.config.to_dict())
        length = -(-settings.length // WINDOW) * WINDOW
        per_token = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * model.dtype.itemsize
        # A squeeze copies up to half of one layer's keys; the logits exist once as they are and four times in float32.
        squeeze = settings.batch * length * per_token // (4 * shape.num_layers)
        logits = settings.batch * shape.vocab_size * (model.dtype.itemsize + 4 * 4)
        return cls(settings.batch * length * per_token, squeeze + logits)

    def check(self, device: torch.device, settings: SampleSettings) -> None:
        free = free_bytes(device)
        if free is not None and self.cache + self.work > free:
            fitting = int(settings.batch * 0.95 * free / (self.cache + self.work))
            raise ValueError(
                f"a batch of {settings.batch} with {settings.length} tokens needs {self.cache / 2**30:.1f} GiB of cache and "
                f"{self.work / 2**30:.1f} GiB to sample, but {free / 2**30:.1f} GiB are free on {device}; "
                + (f"use --batch {fitting} or a smaller --length" if fitting else "use a smaller --length")
            )


@dataclass(frozen=True)
class Sample:
    ids: list[int]
    start: str
    complete: bool  # it ended by itself


def to_lines(samples: list[Sample], tokenizer: PreTrainedTokenizerBase, write: str, digest: str) -> Iterator[str]:
    """Lines of JSON, as ``ladder data prepare`` takes them."""
    texts: dict[int, str] = {}
    if write in ("both", "text"):
        for start in ("plain", "chat"):
            numbers = [number for number, sample in enumerate(samples) if sample.start == start]
            if not numbers:
                continue
            # The marks of a chat's turns are part of its text; those around a plain document are not.
            decoded = tokenizer.batch_decode([samples[number].ids for number in numbers], skip_special_tokens=start == "plain")
            texts |= zip(numbers, decoded, strict=True)
    for number, sample in enumerate(samples):
        row: dict[str, Any] = {}
        if write in ("both", "ids"):
            row |= {"ids": sample.ids, "tokenizer": digest}
        if number in texts:
            row["text"] = texts[number]
        yield json.dumps(row | {"start": sample.start, "complete": sample.complete}, ensure_ascii=False)


class Sampler:
    """A model ready to be sampled from; ``batches()`` goes on for ever."""

    def __init__(self, model: Any, tokenizer: PreTrainedTokenizerBase, settings: SampleSettings) -> None:
        check_lengths(model.config, settings)
        self.tokenizer, self.settings = tokenizer, settings
        self.chat = ChatForm.of(tokenizer) if settings.start != "plain" else None
        self.first, self.end = first_token(tokenizer), end_of_document(tokenizer)
        self.stops = stop_tokens(tokenizer, model.generation_config)
        known = vocabulary_size(tokenizer)
        specials = set(tokenizer.all_special_ids) | self.stops | {self.first}
        self.ordinary = torch.tensor([token for token in range(min(known, model.config.vocab_size)) if token not in specials])
        self.memory = Memory.predicted(model, settings)
        self.memory.check(model.device, settings)
        self.decoder = BatchedSampler(
            model,
            rows=settings.batch,
            length=settings.length,
            temperature=settings.temperature,
            stops=self.stops,
            vocabulary=min(known, model.config.vocab_size),
        )

    def seed_of(self, number: int) -> int:
        """Mixed, not added: batch 1 of seed 0 must not be batch 0 of seed 1, as runs on several GPUs differ in the seed alone."""
        return int(np.random.SeedSequence([self.settings.seed, number]).generate_state(1, np.uint64)[0] >> np.uint64(2))

    def starts(self, number: int) -> Start:
        """How the rows of batch ``number`` begin."""
        rows = self.settings.batch
        chat = torch.full((rows,), self.settings.start == "chat")
        if self.settings.start == "mixed":
            chat = (torch.arange(rows) + number * rows) % 2 == 1
        header = self.chat.header if self.chat else ()
        prompts = torch.full((rows, max(2, len(header))), EMPTY)
        prompts[~chat, 0] = self.first
        if self.settings.random_first:
            generator = torch.Generator().manual_seed(self.seed_of(number))
            drawn = torch.randint(len(self.ordinary), (rows,), generator=generator)
            prompts[~chat, 1] = self.ordinary[drawn][~chat]
        if self.chat is None:
            return Start(prompts, chat)
        prompts[chat, : len(header)] = torch.tensor(header)
        return Start(prompts, chat, self.chat.end_of_turn, self.chat.answer_header)

    def batches(self, report: Callable[[int, int], None] = lambda step, rows: None) -> Iterator[list[Sample]]:
        for number in itertools.count():
            start = self.starts(number)
            rows = self.decoder.sample(start, self.seed_of(number), report)
            kinds = ["chat" if chat else "plain" for chat in start.chat.tolist()]
            samples = [self._sample(row.tolist(), kind) for row, kind in zip(rows, kinds, strict=True)]
            yield [sample for sample in samples if sample.ids]

    def _sample(self, ids: list[int], start: str) -> Sample:
        complete = len(ids) > 1 and ids[-1] in self.stops
        if ids[0] == self.end:
            ids = ids[1:]  # it ended the document before; documents of a corpus are joined by it anyway
        return Sample(ids, start, complete)


def check_lengths(config: Any, settings: SampleSettings) -> None:
    limit = getattr(config, "max_position_embeddings", None)
    if limit and settings.length > limit:
        raise ValueError(f"--length {settings.length} exceeds the model's context of {limit}")
    window = getattr(config, "sliding_window", None)
    if window and settings.length > window:
        raise ValueError(
            f"--length {settings.length} exceeds this model's sliding attention window of {window}; use at most that"
        )


def write_samples(
    sampler: Sampler,
    sink: TextIO,
    progress: Callable[[int], None] = lambda tokens: None,
    report: Callable[[int, int], None] = lambda step, rows: None,
) -> dict[str, float]:
    """Batches until there are enough tokens; totals at the end. ``progress`` gets the tokens on disk after each."""
    digest = tokenizer_digest(sampler.tokenizer)
    tokens = rows = complete = 0
    began = time.perf_counter()
    for batch in sampler.batches(report):
        sink.writelines(line + "\n" for line in to_lines(batch, sampler.tokenizer, sampler.settings.write, digest))
        sink.flush()
        tokens += sum(len(sample.ids) for sample in batch)
        rows += len(batch)
        complete += sum(sample.complete for sample in batch)
        progress(tokens)
        if tokens >= sampler.settings.tokens:
            break
    seconds = time.perf_counter() - began
    return {"tokens": tokens, "rows": rows, "complete": complete, "seconds": seconds, "tokens_per_second": tokens / seconds}


def load_for_sampling(source: str, world: World, dtype: str = "auto") -> tuple[Any, PreTrainedTokenizerBase]:
    """The model with batched-sampling attention where its family allows that, and its tokenizer."""
    tokenizer = read_tokenizer(source)
    config = read_json(with_config(source) / "config.json")
    special = any(config.get(name) for name in _OWN_ATTENTION)
    register_attention()
    return load_model(source, world, dtype=dtype, attention=None if special else ATTENTION), tokenizer
