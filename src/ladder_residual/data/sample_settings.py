"""What ``ladder data sample`` is asked for. No torch: the command line refuses what cannot be."""

from __future__ import annotations

from dataclasses import dataclass

STARTS = ("plain", "chat", "mixed")
CONTENTS = ("both", "ids", "text")


@dataclass(frozen=True, kw_only=True)
class SampleSettings:
    tokens: int
    batch: int = 64
    length: int = 512
    temperature: float = 1.0
    seed: int = 0
    start: str = "plain"
    random_first: bool = False
    write: str = "both"

    def __post_init__(self) -> None:
        for name, least in (("tokens", 1), ("batch", 1), ("length", 2), ("seed", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"--{name} must be at least {least}, got {getattr(self, name)}")
        if not 0 < self.temperature <= 100:
            raise ValueError(f"--temperature must be above 0 (samples must differ) and at most 100, got {self.temperature}")
        if self.start not in STARTS:
            raise ValueError(f"unknown --start {self.start!r}; choose {', '.join(STARTS)}")
        if self.write not in CONTENTS:
            raise ValueError(f"unknown --write {self.write!r}; choose {', '.join(CONTENTS)}")
