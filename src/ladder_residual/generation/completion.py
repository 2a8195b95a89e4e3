"""Text from a model, on any number of ranks. Sampling, stopping and streaming are transformers' own.

Every rank runs the same loop with the same seed on the same logits (all of them, or the best of each rank: ``models/candidates.py``),
so all pick the same tokens; rank 0 prints.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TextStreamer

from ..common.terminal import for_stream
from ..distributed.world import World
from ..models.finite import NonFiniteError, finite_logits
from .request import check_context
from .sampling import Sampling, with_seed
from .tokenizer import tokenize


class _Printer(TextStreamer):
    """Prints text as it comes; what a terminal would obey is written out."""

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        super().on_finalized_text(for_stream(text, sys.stdout), stream_end)


@dataclass
class Completion:
    prompt: str
    text: str
    new_tokens: int
    token_ids: list[int] = field(default_factory=list)

    def to_json(self, **more: str) -> str:
        fields = {"prompt": self.prompt, "text": self.text, "new_tokens": self.new_tokens}
        return json.dumps({**fields, **more}, ensure_ascii=False)


def encode(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: list[str], sampling: Sampling, chat: bool
) -> Any:
    """Token ids, left-padded. A chat template writes its own special tokens, so none are added to its output."""
    options = {"return_tensors": "pt", "padding": True, "add_special_tokens": not chat, "return_token_type_ids": False}
    batch = tokenize(tokenizer, prompts, **options)
    if batch["input_ids"].shape[1] == 0 or not batch["attention_mask"].sum(-1).min():
        raise ValueError("a prompt is empty and the tokenizer adds no first token; give at least one character")
    length, limit = batch["input_ids"].shape[1], getattr(model.config, "max_position_embeddings", None)
    check_context(length, sampling.max_new_tokens, limit)
    if int(batch["input_ids"].max()) >= model.config.vocab_size:
        raise ValueError(
            f"the tokenizer yields token {int(batch['input_ids'].max())}, the model knows {model.config.vocab_size}"
        )
    return batch


def fits(model: Any, tokenizer: PreTrainedTokenizerBase, prompt: str, sampling: Sampling) -> bool:
    """Whether a chat prompt and its answer fit the model's context, and the engine's cache if it has one."""
    limits = (
        getattr(model.config, "max_position_embeddings", None),
        getattr(getattr(model, "engine", None), "max_context", None),
    )
    limit = min((limit for limit in limits if limit), default=None)
    length = len(tokenize(tokenizer, [prompt], add_special_tokens=False)["input_ids"][0])
    return not limit or length + sampling.max_new_tokens <= limit


@torch.inference_mode()
def complete(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    prompts: list[str],
    sampling: Sampling,
    world: World,
    *,
    stream: bool = False,
    chat: bool = False,
    turn: int = 0,
) -> list[Completion]:
    """One batch. ``stream`` prints a single prompt's text as it comes (rank 0); ``turn`` numbers the batches drawn from one seed."""
    asked = len(prompts)
    engine = getattr(model, "engine", None)
    if engine is not None:
        model.start()
        # The engine's graph is for one batch size: a smaller batch is filled up, and what was added is dropped at the end.
        prompts = prompts + prompts[-1:] * (engine.batch - asked)
    batch = encode(model, tokenizer, prompts, sampling, chat).to(world.device)
    seed = with_seed(sampling, world).seed
    assert seed is not None
    torch.manual_seed(seed + turn)
    options = sampling.options()
    if stream and world.is_main and len(prompts) == 1 and sampling.num_beams == 1:
        # A plain prompt is part of the text: decoded together, the first new word keeps its space.
        options["streamer"] = _Printer(tokenizer, skip_prompt=chat, skip_special_tokens=True)
    if sampling.stop:
        options["tokenizer"] = tokenizer
    try:
        with finite_logits(model):
            output = model.generate(**batch, pad_token_id=tokenizer.pad_token_id, **options)
    except NonFiniteError:
        raise
    except ValueError as error:  # settings of the checkpoint that do not go together, each for itself being fine
        raise ValueError(f"cannot generate with these settings: {str(error)[:300]}") from error
    start = batch["input_ids"].shape[1]
    ends = model.generation_config.eos_token_id
    ends = set(ends) if isinstance(ends, list) else {ends}
    results = []
    for prompt, row in zip(prompts[:asked], output[:asked].tolist(), strict=True):
        new = row[start:]
        stop = next((i for i, token in enumerate(new) if token in ends), len(new) - 1)
        kept = new[: stop + 1]
        while len(kept) > 1 and kept[-1] == tokenizer.pad_token_id and kept[-1] not in ends:
            kept.pop()  # the row ended at a stop string; the rest of the batch went on
        results.append(Completion(prompt, _new_text(tokenizer, row[:start], kept), len(kept), kept))
    return results


def _new_text(tokenizer: PreTrainedTokenizerBase, before: list[int], new: list[int]) -> str:
    """What ``new`` adds to the text. Decoded alone, many tokenizers would drop the space before its first word."""
    prefix = str(tokenizer.decode(before, skip_special_tokens=True))
    whole = str(tokenizer.decode(before + new, skip_special_tokens=True))
    return whole[len(prefix) :] if whole.startswith(prefix) else str(tokenizer.decode(new, skip_special_tokens=True))


def complete_all(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: list[str],
    sampling: Sampling,
    world: World,
    *,
    batch_size: int,
    chat: bool,
    stream: bool = False,
    done: int = 0,
) -> Iterator[Completion]:
    """Batch by batch; without the first ``done`` prompts, but with the batches and seeds that all of them would have had."""
    for turn, first in enumerate(range(0, len(prompts), batch_size)):
        if first + batch_size <= done:
            continue
        batch = prompts[first : first + batch_size]
        completions = complete(model, tokenizer, batch, sampling, world, chat=chat, stream=stream, turn=turn)
        yield from completions[max(0, done - first) :]
