"""``load`` and ``generate`` of the Python API."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..common.fields import fields_from
from ..distributed.call import call_on_ranks
from ..distributed.launch import missing_ranks
from ..distributed.world import World, distributed, join
from ..models.loading import load_model
from .completion import Completion, complete_all
from .prompts import Messages, as_text
from .request import LoadOptions, check_request
from .sampling import Sampling
from .session import Session
from .tokenizer import load_tokenizer


@dataclass(frozen=True)
class LoadedModel:
    """What ``load`` returns; ``model, tokenizer = load(...)`` takes it apart.

    Attributes:
        model: A transformers model, in eval mode; under torchrun this rank's shards of it.
        tokenizer: Its tokenizer, which pads on the left.
        world: This process's place among the ranks, and their device.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    world: World

    def __iter__(self) -> Iterator[Any]:
        return iter((self.model, self.tokenizer))


def load(
    source: str | Path,
    *,
    tp: int | None = None,
    wiring: str | None = None,
    dtype: str = "auto",
    device: str = "auto",
    uneven: bool = False,
    allow_nonfinite: bool = False,
) -> LoadedModel:
    """Load a checkpoint and its tokenizer, on one process or on the ranks that torchrun started.

    Under torchrun every rank calls this and reads its own shards. The ranks stay connected until the process ends.

    Args:
        source: Checkpoint directory or hub id, converted or not.
        tp: Number of tensor-parallel ranks. Default: as many as the launcher started.
        wiring: Another wiring than the checkpoint's own, such as ``"ladder:last-half"``.
        dtype: ``"auto"`` (as stored), ``"float32"``, ``"bfloat16"`` or ``"float16"``.
        device: ``"auto"``, ``"cpu"`` or ``"cuda"``.
        uneven: Allow ranks with unequal numbers of heads.
        allow_nonfinite: Load weights that hold NaN or infinite numbers all the same.

    Returns:
        The model and the tokenizer.

    Raises:
        ValueError: If ``tp`` ranks are asked for in a process without a launcher, or the model does not divide over them.

    Examples:
        >>> model, tokenizer = load("stories", wiring="ladder")
        >>> inputs = tokenizer("Once upon a time", return_tensors="pt", return_token_type_ids=False)
        >>> tokenizer.decode(model.generate(**inputs, max_new_tokens=5, do_sample=False)[0], skip_special_tokens=True)
        'Once upon a time, there was a little'
    """
    if missing_ranks(tp):
        raise ValueError(
            f"load(tp={tp}) needs {tp} processes: start the script with torchrun --nproc-per-node {tp}, "
            f"or let generate(..., tp={tp}) or evaluate(..., tp={tp}) start them"
        )
    tokenizer, world = load_tokenizer(source), join(device)
    model = load_model(source, world, wiring=wiring, dtype=dtype, uneven=uneven, allow_nonfinite=allow_nonfinite)
    return LoadedModel(model, tokenizer, world)


def generate(
    source: str | Path | LoadedModel,
    prompts: str | Sequence[str] | Sequence[Messages],
    *,
    tp: int | None = None,
    raw: bool = False,
    max_new_tokens: int = 128,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float | None = None,
    stop: Sequence[str] = (),
    seed: int | None = None,
    num_beams: int = 1,
    batch_size: int = 8,
    wiring: str | None = None,
    dtype: str = "auto",
    engine: str = "auto",
    device: str = "auto",
    uneven: bool = False,
) -> list[Completion]:
    """Complete prompts, on any number of ranks.

    With ``tp`` above 1 in a plain script or notebook the ranks are started for this call, as ``ladder generate --tp`` does. Under
    torchrun every rank calls this with the same arguments and gets the same completions.

    Args:
        source: Checkpoint directory, hub id, or what ``load`` returned.
        prompts: One text, several, or conversations: lists of ``{"role": ..., "content": ...}``.
        tp: Number of tensor-parallel ranks. Default: as many as the launcher started, else 1.
        raw: Take texts as they are. Otherwise an instruct model's chat template makes each a user's message.
        max_new_tokens: Tokens to add to each prompt at most.
        temperature: 0 is greedy. Default: as the checkpoint says; so for the other sampling options.
        top_k: Sample from the ``top_k`` likeliest tokens.
        top_p: Sample from the likeliest tokens that together have this probability.
        min_p: Sample from tokens with at least this share of the likeliest one's probability.
        repetition_penalty: Above 1, tokens that occurred become less likely.
        stop: Strings after which a completion ends.
        seed: The same seed gives the same text.
        num_beams: Beams of a beam search; 1 is none.
        batch_size: Prompts that are computed together.
        wiring: Another wiring than the checkpoint's own.
        dtype: ``"auto"`` (as stored), ``"float32"``, ``"bfloat16"`` or ``"float16"``.
        engine: ``"auto"``, ``"cuda"`` (fused kernels, CUDA graphs) or ``"torch"`` (any device, any model).
        device: ``"auto"``, ``"cpu"`` or ``"cuda"``.
        uneven: Allow ranks with unequal numbers of heads.

    Returns:
        A ``Completion`` for each prompt, in order: ``prompt``, ``text``, ``new_tokens`` and ``token_ids``.

    Examples:
        >>> [completion] = generate("stories", "Once upon a time", max_new_tokens=5, temperature=0)
        >>> completion.text
        ', there was a little'
    """
    arguments = locals()
    asked: Any = [prompts] if isinstance(prompts, str) else list(prompts)
    if not asked:
        raise ValueError("there is no prompt: give a text or a list of texts")
    sampling = fields_from(Sampling, arguments)
    options = fields_from(LoadOptions, arguments)
    if isinstance(source, LoadedModel):
        if options != LoadOptions() or tp not in (None, source.world.size):
            raise ValueError(
                "the model is loaded already: give tp, wiring, dtype and uneven to load(); engine needs a checkpoint"
            )
        model, tokenizer = source
        texts, chat = as_text(asked, tokenizer, template=not raw)
        return list(complete_all(model, tokenizer, texts, sampling, source.world, batch_size=batch_size, chat=chat))
    if missing_ranks(tp):
        assert tp is not None
        check_request(source, sampling, options, tp=tp, device=device)
        return [Completion(**row) for row in call_on_ranks(generate, tp, arguments)]
    with distributed(device) as world:
        session = Session(source, world, sampling, options)
        texts, chat = as_text(asked, session.tokenizer, template=not raw)
        session.load_for(texts, batch_size)
        return list(session.complete(texts, batch_size=batch_size, chat=chat))
