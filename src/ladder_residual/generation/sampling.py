"""What a user asks of sampling, checked, and as transformers takes it. No torch."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ..models.generation_config import LEAST_TEMPERATURE, RANGES

if TYPE_CHECKING:
    from ..distributed.world import World


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """What the user asked for; None leaves the checkpoint's generation config in force. Temperature 0 is greedy."""

    max_new_tokens: int = 128
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop: Sequence[str] | None = ()
    seed: int | None = None
    num_beams: int = 1

    def __post_init__(self) -> None:
        limits = {**RANGES, "max_new_tokens": (1, 10_000_000), "top_k": (0, 10_000_000), "num_beams": (1, 1000)}
        for name, (low, high) in limits.items():
            value = getattr(self, name, None)
            if value is not None and not low <= value <= high:
                raise ValueError(f"{name.replace('_', '-')} must be between {low} and {high}, got {value}")
        if self.temperature and self.temperature < LEAST_TEMPERATURE:
            raise ValueError(f"temperature must be 0 (greedy) or at least {LEAST_TEMPERATURE}, got {self.temperature}")
        if self.seed is not None and not 0 <= self.seed < 2**62:
            raise ValueError(f"seed must be between 0 and {2**62 - 1}, got {self.seed}")
        if any(not text for text in self.stop or ()):
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


def with_seed(sampling: Sampling, world: World) -> Sampling:
    """The same, with a seed: the one given, or one that rank 0 draws for all."""
    if sampling.seed is not None:
        return sampling
    return replace(sampling, seed=world.broadcast(secrets.randbelow(2**31)))
