"""One sentence a person can act on, from a planned row: convert or not, how much of the model, and what limits it."""

from __future__ import annotations

from collections.abc import Sequence

from .planner import TWO_LANES, Case, PlanRow

WORTH_IT = 1.05  # below this a conversion (and its retraining) buys less than run-to-run noise and a driver update


def best_ladder(row: PlanRow) -> tuple[str, float]:
    """The faster schedule of the fully converted model."""
    names = [name for name in ("ladder", TWO_LANES) if name in row.speedup]
    name = max(names, key=row.speedup.__getitem__)
    return name, row.speedup[name]


def advise(row: PlanRow, case: Case) -> str:
    """Advice for one row; ``case`` is what the row was computed from."""
    where = f"{row.model}, tp {row.tp}, {row.link}, batch {row.batch}"
    if not row.fits:
        return (
            f"{where}: does not fit ({row.memory_total_gb:.0f} GB per rank, {row.device} has {case.device.memory_gb:.0f} GB)."
        )
    if row.tp == 1:
        if TWO_LANES in row.speedup and row.speedup[TWO_LANES] >= WORTH_IT:
            return f"{where}: one rank sends nothing; two lanes alone give {row.speedup[TWO_LANES]:.2f}x."
        return f"{where}: one rank sends nothing; the ladder has nothing to hide."
    schedule, gain = best_ladder(row)
    half = row.speedup["ladder:last-half"]
    share = row.limits["all-reduce"]
    waiting = f"all-reduces are {share:.0f} % of a standard step"
    if gain < WORTH_IT and share > 50:
        fewer = row.speedup["desync-4x"]
        return (
            f"{where}: not worth it on this link: {gain:.2f}x, because {waiting} and there is too little compute to hide them; "
            f"fewer ranks, a faster link, or fewer sums (desync-4x: {fewer:.2f}x) would help."
        )
    if gain < WORTH_IT:
        return f"{where}: not worth it on this link: {gain:.2f}x ({waiting})."
    lanes = " in two lanes" if schedule == TWO_LANES else ""
    sentence = (
        f"{where}: convert the last {case.model.num_layers // 2} layers: {half:.2f}x; all{lanes}: {gain:.2f}x ({waiting})"
    )
    if row.speedup["parallel"] > gain:
        sentence += f"; a model trained with parallel blocks would reach {row.speedup['parallel']:.2f}x"
    hidden = row.hidden_percent["ladder"]
    if hidden < 60:
        sentence += f"; the link stays the limit, only {hidden:.0f} % of it hides"
    return sentence + "."


def advise_all(rows: Sequence[PlanRow], cases: Sequence[Case]) -> list[str]:
    return [advise(row, case) for row, case in zip(rows, cases, strict=True)]
