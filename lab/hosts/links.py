"""Shapes of a network between namespaces by name: ``1ms/1gbit`` is one millisecond each way and a gigabit per second out of every host."""

from __future__ import annotations

import re
from dataclasses import dataclass

# A rack's, a row's, a campus's and a city's Ethernet, roughly.
FOUR_LINKS = "0.1ms/10gbit,0.25ms/1gbit,1ms/1gbit,2ms/1gbit"
_TIME = re.compile(r"([0-9]{1,6}(?:\.[0-9]{1,6})?)(us|ms|s)|0")
_RATE = re.compile(r"([0-9]{1,6}(?:\.[0-9]{1,6})?)(k|m|g)bit")


@dataclass(frozen=True)
class NetworkShape:
    seconds: float  # one way
    rate: float | None  # bits per second out of each host; None: whatever the machine does

    @classmethod
    def parse(cls, text: str) -> NetworkShape:
        delay, slash, rate = text.strip().lower().partition("/")
        if slash and not rate:
            raise ValueError(f"the link {text!r:.60} ends after its delay; write e.g. 1ms/1gbit, or 1ms for any rate")
        return cls(_seconds(delay, text), _bits(rate, text) if rate else None)

    @property
    def name(self) -> str:
        return f"{1e3 * self.seconds:g} ms" + (f", {_short(self.rate)}bit/s" if self.rate else "")


def parse_links(text: str) -> list[NetworkShape]:
    """Comma-separated; each link once."""
    links = [NetworkShape.parse(part) for part in text.split(",")]
    if len(set(links)) < len(links):
        raise ValueError(f"--links {text!r:.80} names a link twice")
    return links


def _seconds(delay: str, text: str) -> float:
    match = _TIME.fullmatch(delay)
    if not match:
        raise ValueError(f"cannot read the delay of the link {text!r:.60}; write e.g. 250us, 1ms or 0")
    seconds = float(match[1] or 0) * {"us": 1e-6, "ms": 1e-3, "s": 1.0, None: 0.0}[match[2]]
    if seconds > 1:
        raise ValueError(f"the delay of the link {text!r:.60} is more than a second")
    return seconds


def _bits(rate: str, text: str) -> float:
    match = _RATE.fullmatch(rate)
    if not match:
        raise ValueError(f"cannot read the rate of the link {text!r:.60}; write it as tc does, e.g. 1gbit or 100mbit")
    return float(match[1]) * {"k": 1e3, "m": 1e6, "g": 1e9}[match[2]]


def _short(rate: float) -> str:
    for factor, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if rate >= factor:
            return f"{rate / factor:g} {letter}"
    return f"{rate:g} "
