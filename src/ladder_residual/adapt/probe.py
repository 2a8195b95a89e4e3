"""What converting a set of layers costs, before any retraining: loss and KL against the original, text by text.

Layers are run one by one with the wiring's own functions. What a layer hands on (a small ``State``) is kept for every layer of the
sets we come back to, so that a candidate that differs from layer 20 on is computed from layer 20 on.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..core.reduce import Reducer
from ..core.wiring import State, finalize, ladder, standard
from ..models.finite import NonFiniteError, fix_for, is_finite
from ..models.hf import RewiredLayer, decoder_layers
from ..models.hf_config import wiring_of
from ..train.loss import head_of

_CHUNK = 1 << 24  # logits that exist at a time
_KEPT = 1 << 28  # the original's logits are kept up to this many numbers; beyond, they are computed each time


@dataclass(frozen=True)
class Cost:
    """Of a set of converted layers, one number per row of the text: mean loss of the row, mean KL from the original."""

    layers: tuple[int, ...]
    losses: tuple[float, ...]
    divergences: tuple[float, ...]

    @property
    def loss(self) -> float:
        return sum(self.losses) / len(self.losses)

    @property
    def kl(self) -> float:
        return sum(self.divergences) / len(self.divergences)


class CachedStates(NamedTuple):
    """The state before each layer of one set of layers, for every batch, up to where it was computed."""

    layers: frozenset[int]
    states: list[list[State]]


def inputs_of_layers(model: PreTrainedModel, ids: Tensor) -> tuple[Tensor, list[dict[str, Any]]]:
    """The stream before layer 0, and the masks and rotary tables transformers hands to each layer. No layer runs."""
    seen: list[dict[str, Any]] = []
    start: list[Tensor] = []

    def look(x: Tensor, **kwargs: Any) -> Tensor:
        start.append(x)
        seen.append(kwargs)
        return x

    base: Any = model.base_model
    layer: Any
    try:
        for layer in decoder_layers(model):
            layer.forward = look
        base(input_ids=ids, use_cache=False)
    finally:
        for layer in decoder_layers(model):
            layer.__dict__.pop("forward", None)
    return start[0], seen


class Probe:
    """A model and a text. ``cost`` measures a set of layers; ``cache_states`` keeps its states for the sets that come after it.
    ``converted``: what stands in the place of layers that are converted; default: the same weights."""

    def __init__(
        self, model: PreTrainedModel, rows: Tensor, batch: int = 8, *, converted: Sequence[nn.Module] | None = None
    ) -> None:
        if wiring_of(model.config).kind != "standard":
            raise ValueError(
                "layers are chosen on the original model; this one is rewired already (ladder convert --wiring standard)"
            )
        layers = decoder_layers(model)
        if not isinstance(layers[0], RewiredLayer):
            from ..models.hf import rewire

            rewire(model, "standard")
        self.model, self.layers, self.count = model, layers, len(layers)
        self.converted: Any = converted or layers
        self.reducer = Reducer()
        self.batches = list(rows.to(model.device).split(batch))
        self.passes = 0.0  # how many times the whole stack of layers was run: what a selection costs
        self._starts: list[State] = []
        self._arguments: list[list[dict[str, Any]]] = []
        with torch.no_grad():
            for ids in self.batches:
                start, arguments = inputs_of_layers(model, ids)
                self._starts.append(State(start))
                self._arguments.append(arguments)
        self._original_logits: dict[tuple[int, int], Tensor] = {}  # by batch and first token
        self._keep = rows.numel() * model.config.vocab_size <= _KEPT
        self._costs: dict[frozenset[int], Cost] = {}
        self.empty = CachedStates(frozenset(), [[start] for start in self._starts])
        self.empty = self.cache_states(frozenset(), self.empty)
        self._original_hidden = [self._final(states[-1]) for states in self.empty.states]
        self.original = self._measured(frozenset(), self._original_hidden)

    @torch.no_grad()
    def _run(self, state: State, batch: int, layers: frozenset[int], first: int, keep: list[State] | None) -> State:
        for index in range(first, self.count):
            step, stack = (ladder, self.converted) if index in layers else (standard, self.layers)
            layer: Any = stack[index]
            state = step(state, layer.branches(self._arguments[batch][index]), self.reducer)
            if keep is not None:
                keep.append(state)
        self.passes += (self.count - first) / self.count / len(self.batches)
        return state

    def _first_difference(self, layers: frozenset[int], cached: CachedStates) -> int:
        return min(layers ^ cached.layers, default=self.count)

    def cache_states(self, layers: Iterable[int], near: CachedStates | None = None) -> CachedStates:
        """All states of a set, starting from where it first differs from ``near``."""
        chosen = frozenset(layers)
        near = near or self.empty
        first = min(self._first_difference(chosen, near), len(near.states[0]) - 1)
        states = []
        for batch, known in enumerate(near.states):
            kept = list(known[: first + 1])
            self._run(kept[-1], batch, chosen, first, kept)
            states.append(kept)
        return CachedStates(chosen, states)

    def cost(self, layers: Iterable[int], near: CachedStates | None = None) -> Cost:
        """Measured once, starting from where the set first differs from ``near`` (default: the original)."""
        chosen = frozenset(layers)
        if chosen not in self._costs:
            near = near or self.empty
            first = self._first_difference(chosen, near)
            states = [self._run(known[first], batch, chosen, first, None) for batch, known in enumerate(near.states)]
            self._costs[chosen] = self._measured(chosen, [self._final(state) for state in states])
        return self._costs[chosen]

    @torch.no_grad()
    def _final(self, state: State) -> Tensor:
        base: Any = self.model.base_model
        norm = getattr(base, "norm", None) or base.final_layer_norm
        return norm(finalize(state, self.reducer))

    @torch.no_grad()
    def _measured(self, layers: frozenset[int], hidden: Sequence[Tensor]) -> Cost:
        head = head_of(self.model)
        chunk = max(1, _CHUNK // self.model.config.vocab_size)
        losses: list[float] = []
        divergences: list[float] = []
        for batch, (ids, ours, original) in enumerate(zip(self.batches, hidden, self._original_hidden, strict=True)):
            length = ids.shape[1]
            targets = ids[:, 1:].reshape(-1)
            ours, original = (states[:, :-1].reshape(-1, states.shape[-1]) for states in (ours, original))
            entropy, kl = torch.empty(2, len(targets), device=ids.device)
            for start in range(0, len(targets), chunk):
                part = slice(start, start + chunk)
                logits = head.logits(ours[part]).float()
                total = logits.logsumexp(-1)
                entropy[part] = total - logits.gather(-1, targets[part, None])[:, 0]
                reference = self._original_logits.get((batch, start))
                if reference is None:
                    reference = head.logits(original[part]).float()
                    if self._keep:
                        self._original_logits[batch, start] = reference
                reference_total = reference.logsumexp(-1)
                # KL = sum of p (log p - log q): the logarithms of the two totals are taken out of the sum over the vocabulary.
                weights = (reference - reference_total[:, None]).exp_()
                kl[part] = torch.linalg.vecdot(weights, reference - logits) + total - reference_total
            if not is_finite(entropy):
                raise NonFiniteError(
                    f"the loss is NaN or infinite with layers {sorted(layers)} converted{fix_for(self.model.dtype)}"
                )
            losses += entropy.view(-1, length - 1).mean(1).tolist()
            divergences += kl.view(-1, length - 1).mean(1).tolist()
        return Cost(tuple(sorted(layers)), tuple(losses), tuple(divergences))
