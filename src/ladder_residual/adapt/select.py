"""Which layers to convert: every layer's cost alone, then the best sets of each size, found greedily.

Sets of size k+1 grow out of the best set of size k and out of the last k layers; only the most promising additions are tried,
by what they cost when last tried. The last k layers themselves are always among the candidates, and another set replaces them only
if it is better on the calibration text by more than chance (paired over its rows): so that what we choose is not worse elsewhere.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tqdm import tqdm

from .preflight import check_amount
from .probe import Cost, Probe

Phase = Callable[[str, int], Any]  # (what is done, of how many steps) -> a tqdm bar

ORDERS = ("last-k", "first-k", "every-other")


@dataclass
class Selection:
    """What was measured on the calibration text. ``chosen[k]`` is our set of k layers."""

    layers: int
    original_loss: float
    single: list[Cost]
    chosen: dict[int, Cost]
    last: dict[int, Cost]
    passes: float = 0.0
    reasons: dict[int, str] = field(default_factory=dict)

    def within(self, budget: float) -> int:
        """The most layers whose conversion raises the loss by no more than ``budget`` nats."""
        return max((k for k, cost in self.chosen.items() if cost.loss - self.original_loss <= budget), default=0)


def silent(name: str, total: int) -> Any:
    return tqdm(total=total, disable=True)


def ordered(order: str, layers: int, k: int) -> tuple[int, ...]:
    """The first k layers of an order: from the top, from the bottom, or every second one from the top and then the others."""
    if order == "last-k":
        return tuple(range(layers - k, layers))
    if order == "first-k":
        return tuple(range(k))
    if order == "every-other":
        return tuple(sorted([*range(layers - 1, -1, -2), *range(layers - 2, -1, -2)][:k]))
    raise ValueError(f"unknown order {order!r}; choose from {', '.join(ORDERS)}")


def select(
    probe: Probe,
    most: int | None = None,
    *,
    budget: float | None = None,
    width: int = 4,
    phase: Phase = silent,
) -> Selection:
    """The best sets of 1 to ``most`` layers, or of as many as stay within ``budget`` nats of loss. ``width`` additions are tried
    for each of the two sets that a size grows from."""
    count = probe.count
    check_amount(most, budget, count)
    most = count if most is None else most
    single = []
    with phase("each layer alone", count * (count + 1) // 2) as bar:
        for layer in range(count):
            single.append(probe.cost([layer]))
            bar.update(count - layer)  # the layers that ran: those below kept the original's states
    selection = Selection(count, probe.original.loss, single, {}, {})
    expected = {layer: cost.kl for layer, cost in enumerate(single)}  # what adding a layer cost when last tried
    best, last = probe.empty, probe.empty
    with phase("sets of layers", most) as bar:
        for k in range(1, most + 1):
            grown_from = {cached.layers: cached for cached in (best, last)}
            last = probe.cache_states(ordered("last-k", count, k), last)
            reference = selection.last[k] = probe.cost(last.layers, last)
            candidates = {frozenset(reference.layers): reference}
            if k == 1:
                candidates = {frozenset(cost.layers): cost for cost in single} | candidates
            for cached in grown_from.values() if k > 1 else ():
                before = probe.cost(cached.layers, cached).kl
                others = [layer for layer in range(count) if layer not in cached.layers]
                for layer in sorted(others, key=expected.__getitem__)[:width]:
                    grown = cached.layers | {layer}
                    if grown not in candidates:
                        candidates[grown] = probe.cost(grown, cached)
                        expected[layer] = candidates[grown].kl - before
            winner, reason = _winner(reference, candidates.values())
            selection.chosen[k], selection.reasons[k] = winner, reason
            best = last if winner is reference else probe.cache_states(winner.layers, best)
            bar.update()
            if budget is not None and min(winner.loss, reference.loss) - selection.original_loss > 2 * budget:
                break  # well past it: further layers will not bring it back
    selection.passes = probe.passes
    return selection


def _winner(reference: Cost, candidates: Iterable[Cost]) -> tuple[Cost, str]:
    """The candidate nearest to the original, unless its advantage over the last k layers may be chance."""
    best = min(candidates, key=lambda cost: cost.kl)
    if best is reference:
        return reference, "the last layers are the best set found"
    for name, ours, theirs in (
        ("KL", best.divergences, reference.divergences),
        ("loss", best.losses, reference.losses),
    ):
        gains = [b - a for a, b in zip(ours, theirs, strict=True)]
        mean, error = mean_and_error(gains)
        if mean <= error:
            return reference, f"the last layers: a set with less KL was found, but its {name} is not better by more than chance"
    return best, f"KL {best.kl:.4f} against {reference.kl:.4f} of the last layers"


def mean_and_error(values: list[float]) -> tuple[float, float]:
    """The mean and its standard error."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return mean, 0.0
    return mean, statistics.stdev(values) / math.sqrt(len(values))


def curves(
    probe: Probe, selection: Selection, sizes: Sequence[int] | None = None, phase: Phase = silent
) -> dict[str, list[dict[str, Any]]]:
    """Cost against number of layers (``sizes``; default: all), on the probe's text: our choice and the three fixed orders."""
    sizes = sorted(selection.chosen) if sizes is None else sizes
    sets: dict[str, list[tuple[int, ...]]] = {"ours": [selection.chosen[k].layers for k in sizes]}
    sets |= {order: [ordered(order, probe.count, k) for k in sizes] for order in ORDERS}
    found: dict[str, list[dict[str, Any]]] = {}
    with phase("curves", len(sets) * len(sizes)) as bar:
        for order, of_order in sets.items():
            found[order] = []
            for k, layers in zip(sizes, of_order, strict=True):
                cost = probe.cost(layers)
                point = {"k": k, "layers": list(cost.layers), "loss": cost.loss, "kl": cost.kl}
                found[order].append(point | {"rise": cost.loss - probe.original.loss})
                bar.update()
    return found
