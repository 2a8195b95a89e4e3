"""Decode steps of one model under several wirings, for benchmarks and traces."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from ..core.config import Wiring
from ..core.reduce import Reducer
from ..models.families import family_of
from ..models.hf import decoder_layers, place_layers
from ..models.loading import set_reducers


class DecodeLoop:
    """One wiring's running sequence. All wirings share the model's weights; only the placement of its layers changes."""

    def __init__(
        self, model: PreTrainedModel, spec: str, reducer: Reducer, batch: int, prompt: int, device: torch.device
    ) -> None:
        self.model, self.reducer = model, reducer
        self.wiring = Wiring.parse(spec, model.config.num_hidden_layers)
        self.cache = DynamicCache(config=model.config)
        generator = torch.Generator().manual_seed(0)
        self.token = torch.randint(0, model.config.vocab_size, (batch, prompt), generator=generator).to(device)
        self.prompt = prompt
        self.norms: list[tuple[Any, str, Any]] = []
        if name := family_of(model.config.to_dict()).mlp_norm:
            if any(not hasattr(layer, name) for layer in decoder_layers(model)):
                raise ValueError("the checkpoint's wiring is parallel: its layers lack a norm that the other wirings need")
            self.norms = [(layer, name, getattr(layer, name)) for layer in decoder_layers(model)]

    def step(self) -> None:
        self.rewire()
        self.forward()

    def forward(self) -> None:
        logits = self.model(self.token, past_key_values=self.cache, use_cache=True, logits_to_keep=1).logits
        self.token = logits[:, -1:].argmax(-1)

    def rewire(self) -> None:
        for layer, name, norm in self.norms:  # a parallel wiring before this one has taken them away
            setattr(layer, name, norm)
        self.model.config.wiring = self.wiring.spec
        place_layers(self.model)
        set_reducers(self.model, self.reducer)

    def rewind(self) -> None:
        """Back to the end of the prompt, so that every measured step sees the same context."""
        surplus = self.cache.get_seq_length() - self.prompt
        if surplus > 0:
            self.cache.crop(-surplus)


def synchronize(device: torch.device) -> None:
    """Wait for what was queued on a GPU; a CPU has nothing queued."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
