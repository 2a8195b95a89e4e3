"""Text from a checkpoint, on any number of ranks. Sampling, stopping and streaming are transformers' own.

Every rank runs the same loop with the same seed on the same logits (all of them, or the best of each rank: ``candidates.py``), so all
pick the same tokens; rank 0 speaks.
"""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase, TextStreamer

from .checkpoint import read_json, resolve
from .engine.emulate import Link
from .engine.reducers import REAL_REDUCERS
from .engine.schedule import SCHEDULES
from .generation_settings import LEAST_TEMPERATURE
from .launch import is_out_of_memory
from .parallel import World

TOKENIZER_CONFIG_BYTES = 8 << 20  # published ones have up to 1.2 MB


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """What the user asked for; None leaves the checkpoint's generation config in force. Temperature 0 is greedy."""

    max_new_tokens: int = 128
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop: tuple[str, ...] = ()
    seed: int | None = None
    num_beams: int = 1

    def __post_init__(self) -> None:
        limits = {
            "max_new_tokens": (1, 10_000_000),
            "temperature": (0, 1000),
            "top_k": (0, 10_000_000),
            "top_p": (0, 1),
            "min_p": (0, 1),
            "repetition_penalty": (1e-6, 1000),
            "num_beams": (1, 1000),
        }
        for name, (low, high) in limits.items():
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise ValueError(f"{name.replace('_', '-')} must be between {low} and {high}, got {value}")
        if self.temperature and self.temperature < LEAST_TEMPERATURE:
            raise ValueError(f"temperature must be 0 (greedy) or at least {LEAST_TEMPERATURE}, got {self.temperature}")
        if self.seed is not None and not 0 <= self.seed < 2**62:
            raise ValueError(f"seed must be between 0 and {2**62 - 1}, got {self.seed}")
        if any(not text for text in self.stop):
            raise ValueError("a stop string is empty")

    def options(self) -> dict[str, Any]:
        """As ``generate`` takes them."""
        given: dict[str, Any] = {"max_new_tokens": self.max_new_tokens, "num_beams": self.num_beams, "num_return_sequences": 1}
        for name in ("top_k", "top_p", "min_p", "repetition_penalty"):
            if getattr(self, name) is not None:
                given[name] = getattr(self, name)
        if self.temperature == 0:
            given |= {"do_sample": False, "temperature": None, "top_k": None, "top_p": None, "min_p": None}
        elif self.temperature is not None:
            given |= {"do_sample": True, "temperature": self.temperature}
        elif {"top_k", "top_p", "min_p"} & given.keys():
            given["do_sample"] = True
        if self.stop:
            given["stop_strings"] = list(self.stop)
        return given


@dataclass
class Completion:
    prompt: str
    text: str
    new_tokens: int
    token_ids: list[int] = field(default_factory=list)

    def to_json(self, **more: str) -> str:
        fields = {"prompt": self.prompt, "text": self.text, "new_tokens": self.new_tokens}
        return json.dumps({**fields, **more}, ensure_ascii=False)


def load_tokenizer(source: str | Path) -> PreTrainedTokenizerBase:
    directory = resolve(source)
    if (directory / "tokenizer_config.json").exists():
        read_json(directory / "tokenizer_config.json", TOKENIZER_CONFIG_BYTES)
    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    except BaseException as error:  # transformers raises many unrelated kinds for a missing or broken tokenizer
        if not _is_tokenizers_fault(error):
            raise
        raise ValueError(f"{directory} has no tokenizer transformers can load: {str(error)[:300]}") from error
    limit = tokenizer.model_max_length
    if not isinstance(limit, int | float) or isinstance(limit, bool) or not limit > 0:
        raise ValueError(
            f"{directory / 'tokenizer_config.json'}: model_max_length is {limit!r:.40}, expected a number of tokens"
        )
    tokenizer.padding_side = "left"  # the last position of every row is where its next token comes from
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token_id is None:
            raise ValueError(f"the tokenizer of {directory} has neither a pad nor an eos token; batches need one of them")
        tokenizer.pad_token_id = tokenizer.eos_token_id
    return tokenizer


def _is_tokenizers_fault(error: BaseException) -> bool:
    """The Rust library under it panics now and then, which Python sees as an error outside ``Exception``."""
    if is_out_of_memory(error):
        return False
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def tokenize(tokenizer: PreTrainedTokenizerBase, prompts: list[str], **options: Any) -> Any:
    """ValueError for what the tokenizer cannot do; prompts are not repeated in it."""
    check_text(prompts)
    try:
        return tokenizer(prompts, **options)
    except BaseException as error:
        if not _is_tokenizers_fault(error):
            raise
        raise ValueError(f"the tokenizer fails on the prompts: {type(error).__name__}: {str(error)[:200]}") from error


def chat_prompt(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]]) -> str:
    if not tokenizer.chat_template:
        raise ValueError("this checkpoint has no chat template; use `ladder generate` with a plain prompt")
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))


def with_seed(sampling: Sampling, world: World) -> Sampling:
    """The same, with a seed: the one given, or one that rank 0 draws for all."""
    if sampling.seed is not None:
        return sampling
    return replace(sampling, seed=world.broadcast(int(torch.seed() % 2**31)))


def check_text(prompts: list[str]) -> None:
    """A command line may hand over bytes that are no text; tokenizers answer that with riddles."""
    for prompt in prompts:
        try:
            prompt.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ValueError(f"a prompt is not valid text: character {error.start} cannot be written in UTF-8") from error


def encode(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: list[str], sampling: Sampling, chat: bool
) -> Any:
    """Token ids, left-padded. A chat template writes its own special tokens, so none are added to its output."""
    options = {"return_tensors": "pt", "padding": True, "add_special_tokens": not chat, "return_token_type_ids": False}
    batch = tokenize(tokenizer, prompts, **options)
    if batch["input_ids"].shape[1] == 0 or not batch["attention_mask"].sum(-1).min():
        raise ValueError("a prompt is empty and the tokenizer adds no first token; give at least one character")
    length, limit = batch["input_ids"].shape[1], getattr(model.config, "max_position_embeddings", None)
    if limit and length + sampling.max_new_tokens > limit:
        raise ValueError(
            f"a prompt of {length} tokens and {sampling.max_new_tokens} new ones exceed the model's context of {limit}; "
            f"shorten the prompt or use --max-new-tokens {max(1, limit - length)}"
        )
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
    return not limit or len(tokenizer(prompt, add_special_tokens=False)["input_ids"]) + sampling.max_new_tokens <= limit


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
        options["streamer"] = TextStreamer(tokenizer, skip_prompt=chat, skip_special_tokens=True)
    if sampling.stop:
        options["tokenizer"] = tokenizer
    try:
        output = model.generate(**batch, pad_token_id=tokenizer.pad_token_id, **options)
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
    told = str(tokenizer.decode(before, skip_special_tokens=True))
    whole = str(tokenizer.decode(before + new, skip_special_tokens=True))
    return whole[len(told) :] if whole.startswith(told) else str(tokenizer.decode(new, skip_special_tokens=True))


def read_prompts(path: Path, tokenizer: PreTrainedTokenizerBase) -> tuple[list[str], bool]:
    """Prompts of a file, one a line: plain text, or JSON objects with ``prompt`` or ``messages``. Also: whether they are chats."""
    prompts: list[str] = []
    kinds = set()
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # not splitlines(): a JSON string may hold a U+2028
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error}") from error
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error}") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        if path.suffix != ".jsonl":
            kinds.add(False)
            prompts.append(line)
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}, line {number}: not JSON: {error}") from error
        if isinstance(row, dict) and isinstance(row.get("prompt"), str):
            kinds.add(False)
            prompts.append(row["prompt"])
        elif isinstance(row, dict) and isinstance(row.get("messages"), list):
            kinds.add(True)
            if not all(
                isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str)
                for m in row["messages"]
            ):
                raise ValueError(f'{path}, line {number}: every message needs "role" and "content", both text')
            prompts.append(chat_prompt(tokenizer, row["messages"]))
        else:
            raise ValueError(f'{path}, line {number}: expected an object with "prompt" (text) or "messages" (a list)')
    if not prompts:
        raise ValueError(f"{path} holds no prompt")
    if len(kinds) > 1:
        raise ValueError(f'{path} mixes "prompt" and "messages" lines; use one kind per file')
    return prompts, kinds.pop()


def complete_all(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: list[str],
    sampling: Sampling,
    world: World,
    *,
    batch_size: int,
    chat: bool,
) -> Iterator[Completion]:
    """Batch by batch."""
    for turn, first in enumerate(range(0, len(prompts), batch_size)):
        yield from complete(model, tokenizer, prompts[first : first + batch_size], sampling, world, chat=chat, turn=turn)


def with_engine(
    model: PreTrainedModel,
    world: World,
    kind: str,
    *,
    batch: int,
    context: int,
    beams: int,
    schedule: str,
    reducer: str = "nccl",
    link: Link | None = None,
) -> Any:
    """``model`` itself, or the CUDA engine holding its weights. ``auto`` falls back to the model with one warning, unless the
    other ranks are emulated (``link``): only the engine does that."""
    if kind not in ("auto", "cuda", "torch"):
        raise ValueError(f"unknown engine {kind!r}; choose auto, cuda or torch")
    if schedule not in ("auto", *SCHEDULES):
        raise ValueError(f"unknown schedule {schedule!r}; choose from auto, {', '.join(SCHEDULES)}")
    if reducer not in REAL_REDUCERS:
        raise ValueError(f"unknown reducer {reducer!r}; choose {' or '.join(REAL_REDUCERS)}")
    if reducer != "nccl" and (kind == "torch" or world.device.type != "cuda"):
        raise ValueError(f"--reducer {reducer} is the CUDA engine's; the slow path sums with NCCL or gloo")
    if link is not None:
        if reducer != "nccl":
            raise ValueError(f"--emulate has a link in the place of a reducer: leave out --reducer {reducer}")
        if kind == "torch" or world.device.type != "cuda":
            raise ValueError("--emulate needs the CUDA engine and a GPU; ladder plan answers without one")
        kind = "cuda"
    if kind == "torch" or (kind == "auto" and world.device.type != "cuda"):
        return model
    from .engine.backend import engine_model

    try:
        if beams > 1:
            raise ValueError("the CUDA engine's cache cannot follow beams; use --num-beams 1")
        limit = getattr(model.config, "max_position_embeddings", context)
        sizes = {"batch": batch, "max_context": min(context, limit)}
        return engine_model(model, world, **sizes, schedule=schedule, reducer=reducer, link=link, exact=kind == "cuda")
    except ValueError as error:
        if kind == "cuda":
            raise
        warnings.warn(f"using the slow path: {error}", stacklevel=2)
        return model


class Stopwatch:
    """Tokens and seconds, for the line at the end."""

    def __init__(self) -> None:
        self.tokens, self.seconds = 0, 0.0

    def __enter__(self) -> Stopwatch:
        self._start = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds += time.perf_counter() - self._start

    def __str__(self) -> str:
        rate = self.tokens / self.seconds if self.seconds else 0.0
        return f"{self.tokens} tokens in {self.seconds:.2f} s, {rate:.1f} tokens/s"
