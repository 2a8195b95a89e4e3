"""Annealing the wiring: all converted layers go from standard to ladder together, gradually, over the first part of a run."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel, TrainerCallback

from ..models.checkpoint_reader import read_json
from ..models.hf import set_switched

FILE = "anneal.json"  # in a checkpoint


class Anneal(TrainerCallback):
    """``switched`` grows by equal steps from 0 (standard) to 1 (ladder) over ``share`` of the run. It pauses after a step whose KL to
    the teacher was above ``bound``, though not for longer than that it is 1 after twice the share."""

    def __init__(self, model: PreTrainedModel, share: float, bound: float, log: Callable[[str], None]) -> None:
        self.model, self.share, self.bound, self.log = model, share, bound, log
        self.paused, self.used = 0, 0.0  # steps; ``switched`` in the step that ended last
        device = next(model.parameters()).device
        self._value = torch.zeros((), device=device)  # what the layers read; in one place for a CUDA graph
        self._divergence = torch.zeros((), device=device)
        self._set(0.0)

    def _set(self, switched: float) -> None:
        self.switched = switched
        self._value.fill_(switched)
        set_switched(self.model, self._value if switched < 1 else None)

    def note(self, divergence: Tensor) -> None:
        """This rank's share of a step's mean KL, or a part of it."""
        self._divergence += divergence.detach()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.used = self.switched
        if self.switched == 1:
            return
        if dist.is_initialized():
            dist.all_reduce(self._divergence)
        above = float(self._divergence) > self.bound
        self._divergence.zero_()
        self.paused += above
        done = state.global_step / (self.share * state.max_steps)  # of the annealing, were there no pauses
        step = 0.0 if above else 1 / (self.share * state.max_steps)
        self._set(min(1.0, max(self.switched + step, done - 1)))
        if self.switched == 1:
            self.log(f"anneal   ladder from step {state.global_step + 1} on, paused for {self.paused} steps")

    @contextmanager
    def as_ladder(self) -> Iterator[None]:
        """The model as it will be saved."""
        set_switched(self.model, None)
        try:
            yield
        finally:
            self._set(self.switched)

    def save(self, checkpoint: Path) -> None:
        (checkpoint / FILE).write_text(json.dumps({"switched": self.switched, "paused": self.paused}), encoding="utf-8")

    def load(self, checkpoint: Path) -> None:
        stored = read_json(checkpoint / FILE)
        switched, paused = stored.get("switched"), stored.get("paused")
        if not isinstance(switched, float) or not 0 <= switched <= 1 or not isinstance(paused, int):
            raise ValueError(f"{FILE} holds {stored!r:.80}")
        self.paused = paused
        self._set(switched)
