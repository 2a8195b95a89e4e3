"""The next token of a vocabulary that ranks share out, chosen from a few numbers of each rank instead of all logits.

Greedy decoding needs the best logit, sampling among the k best needs those. Each rank sends its own best; the logits handed to
transformers are minus infinity everywhere else, and what it then does with them (temperature, top-p among the k best, the draw)
gives the same token as the whole vocabulary would. Where the choice depends on more than the best (penalties, beams, top-p alone),
or where ties leave open which are the k best, logits are gathered.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper
from transformers.generation import GenerationMode

_EXACT_IN_FLOAT32 = 1 << 24  # token numbers travel beside their logits
_ROUNDING = 1e-5  # of a logit: a temperature or scale applied later may make ties of what differs by less


class Candidates(NamedTuple):
    """How many of the best logits decide; ``with_ties``: also all that equal the last of them, as transformers' top-k keeps."""

    best: int
    with_ties: bool


GREEDY = Candidates(1, with_ties=False)  # of several best the first is taken, on a rank as over all


def deciding(settings: Any, processors: LogitsProcessorList) -> Candidates | None:
    """What a call of ``generate`` needs to choose its tokens; None: everything."""
    if settings.output_scores or settings.output_logits:
        return None
    mode = settings.get_generation_mode()
    if mode == GenerationMode.GREEDY_SEARCH:
        return GREEDY if not processors else None
    if mode != GenerationMode.SAMPLE:
        return None
    for processor in processors:
        if isinstance(processor, TopKLogitsWarper):
            return Candidates(processor.top_k, with_ties=True)  # whatever follows sees only those
        if not isinstance(processor, TemperatureLogitsWarper):
            return None
    return None


def best_of_ranks(local: Tensor, first: int, count: int, gather: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """The ``count`` best logits of each rank and their tokens, both [..., ranks, count] and best first. ``local`` are this rank's
    logits, of tokens ``first`` and on; ``gather`` concatenates the ranks' tensors along the last dim."""
    # max finds the first of equals, topk any
    values, places = local.max(-1, keepdim=True) if count == 1 else local.topk(count, dim=-1)
    message = torch.cat([values.float(), (places + first).float()], dim=-1)
    values, tokens = gather(message).unflatten(-1, (-1, 2, count)).unbind(-2)
    return values, tokens.long()


def decisive_logits(
    local: Tensor, first: int, vocabulary: int, ranks: int, needed: Candidates, gather: Callable[[Tensor], Tensor]
) -> Tensor | None:
    """Logits [..., vocabulary] of which only the deciding ones are finite, alike on all ranks; None (on all ranks) where they
    cannot be told from a few."""
    sent = needed.best + needed.with_ties  # one more shows whether a rank has further ones that equal the last
    if 4 * sent > vocabulary // ranks or vocabulary > _EXACT_IN_FLOAT32:
        return None
    values, tokens = best_of_ranks(local, first, sent, gather)
    if needed.with_ties:
        last = values.flatten(-2).topk(needed.best, dim=-1).values[..., -1:]
        if bool((values[..., -1] >= last - _ROUNDING * last.abs()).any()):
            return None
    full = torch.full((*values.shape[:-2], vocabulary), float("-inf"), device=values.device)
    return full.scatter_(-1, tokens.flatten(-2), values.flatten(-2))


class ChoosesFromCandidates:
    """Mixed into a class with transformers' ``generate``: tells ``needs`` what the run at hand needs, and None at its end."""

    _choosing = False  # within a ``generate`` whose loop is transformers' own and chooses from this model's logits alone

    def needs(self, candidates: Candidates | None) -> None:
        raise NotImplementedError

    def _get_logits_processor(self, generation_config: Any, *args: Any, **kwargs: Any) -> Any:
        # The list transformers builds is the one statement of what will be done to the logits; without this call all are gathered.
        processors = super()._get_logits_processor(generation_config, *args, **kwargs)  # type: ignore[misc]
        if self._choosing:
            self.needs(deciding(generation_config, processors))
        return processors

    def generate(self, inputs: Any = None, *args: Any, **kwargs: Any) -> Any:
        # An assistant's tokens are weighed against all logits, and a loop of the caller's own may read any.
        self._choosing = not args and not kwargs.get("assistant_model") and not kwargs.get("custom_generate")
        try:
            return super().generate(inputs, *args, **kwargs)  # type: ignore[misc]
        finally:
            self._choosing = False
            self.needs(None)
