"""Whether a recovery run helped: rows kept to measure on, the gap to the teacher, and the sentences and the file that say it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..data.packing import MixedRows, RowStore

FILE = "adapt.json"


def hold_out(
    stores: Mapping[str, RowStore], share: float, *, at_most: int, needed: int
) -> tuple[list[RowStore], dict[str, RowStore]]:
    """A share of each source's rows to measure on, and the other rows to train on. A text that has no more than the ``needed`` rows of
    a step is trained on whole, and nothing is measured."""
    kept = {
        name: min(max(1, round(share * len(store))), max(1, at_most // len(stores)), len(store) - 1)
        for name, store in stores.items()
    }
    rows = sum(map(len, stores.values()))
    if not share or min(kept.values()) < 1 or rows - sum(kept.values()) < needed:
        return list(stores.values()), {}
    parts = {name: store.split(kept[name]) for name, store in stores.items()}
    return [train for train, _ in parts.values()], {name: held for name, (_, held) in parts.items()}


def share_seen(rows: MixedRows, stores: Sequence[RowStore]) -> float:
    """Of the rows there are, the per cent a run visits at least once."""
    return 100 * len({(int(source), int(row)) for source, row in rows.order}) / max(1, sum(map(len, stores)))


def gap_closed(before: float, after: float, teacher: float) -> float | None:
    """Per cent of the distance from the converted model's loss to its teacher's; None where there was none."""
    return 100 * (before - after) / (before - teacher) if before > teacher else None


def compared(
    before: Mapping[str, Mapping[str, float]], after: Mapping[str, Mapping[str, float]], teacher: Mapping[str, float]
) -> dict[str, dict[str, float | None]]:
    """By held-out text: loss before and after, the teacher's, and the gap that was closed."""
    found: dict[str, dict[str, float | None]] = {}
    for text, result in after.items():
        first, goal = before.get(text, {}).get("loss"), teacher.get(text)
        gap = gap_closed(first, result["loss"], goal) if first is not None and goal is not None else None
        found[text] = {"before": first, "after": result["loss"], "teacher": goal, "gap_closed_percent": gap}
    return found


def sentences(texts: Mapping[str, Mapping[str, float | None]]) -> list[str]:
    """A line for each held-out text, and whether it helped."""
    if not texts:
        return ["nothing was measured: the text is too short to keep rows back; give --heldout FILE to see whether it helped"]
    lines, changes = [], []
    for text, found in texts.items():
        before, after, teacher, gap = (found[key] for key in ("before", "after", "teacher", "gap_closed_percent"))
        line = f"{text}: held-out loss " + (f"{before:.4f} -> " if before is not None else "") + f"{after:.4f}"
        line += f", the teacher's is {teacher:.4f}" if teacher is not None else ""
        line += f": {gap:.0f} % of the gap closed" if gap is not None else ""
        lines.append(line)
        if before is not None and after is not None:
            changes.append(before - after)
    if changes and min(changes) > 0:
        lines.append("it helped: the loss fell on text that was not trained on")
    elif changes and max(changes) <= 0:
        lines.append(
            "it did not help: the loss did not fall on text that was not trained on; try a lower --lr or more --tokens"
        )
    elif changes:
        lines.append("it helped on some of the texts and not on others")
    return lines
