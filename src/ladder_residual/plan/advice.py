"""Sentences a person can act on, from planned rows: convert or not, how much of the model, and what limits it."""

from __future__ import annotations

from collections.abc import Sequence

from .planner import TWO_STREAM, PlanRow

WORTH_IT = 1.05  # below this a conversion (and its retraining) buys less than run-to-run noise and a driver update


def best_ladder(row: PlanRow) -> tuple[str, float]:
    """The faster schedule of the fully converted model."""
    names = [name for name in ("ladder", TWO_STREAM) if name in row.speedup]
    name = max(names, key=row.speedup.__getitem__)
    return name, row.speedup[name]


def best_row(rows: Sequence[PlanRow]) -> PlanRow:
    """Of the rows that fit, the one that gains most."""
    return max((row for row in rows if row.fits), key=lambda row: best_ladder(row)[1])


def verdict(rows: Sequence[PlanRow]) -> str:
    """What the whole plan says: the advice of its only row, or how many rows are worth it and the advice of the best."""
    if len(rows) == 1:
        return rows[0].advice
    worth = sum(row.fits and best_ladder(row)[1] >= WORTH_IT for row in rows)
    best = best_row(rows).advice
    return f"Worth converting in {worth} of {len(rows)} cases; the best: {best[0].lower()}{best[1:]}"


def dtypes_of(row: PlanRow) -> str:
    """``, fp8 weights, fp8 KV cache``: nothing for bf16."""
    named = {"weights": row.weights, "KV cache": row.kv_cache_dtype}
    return "".join(f", {dtype} {what}" for what, dtype in named.items() if dtype != "bf16")


def advise(row: PlanRow) -> str:
    """Advice for one row."""
    where = f"{row.model} (tp {row.tp}, {row.link}, batch {row.batch}{dtypes_of(row)})"
    if not row.fits:
        need = f"{row.memory_total_gb:.0f} GB per rank, {row.device} has {row.case.device.memory_gb:.0f} GB"
        return f"Does not fit: {where} needs {need}."
    if row.tp == 1:
        if TWO_STREAM in row.speedup and row.speedup[TWO_STREAM] >= WORTH_IT:
            alone = f"the two-stream schedule alone gives {row.speedup[TWO_STREAM]:.2f}x"
            return f"Convert {where} for its schedule only: one rank sends nothing; {alone}."
        return f"Do not convert {where}: one rank sends nothing; the ladder has nothing to hide."
    schedule, gain = best_ladder(row)
    share = row.limits["all-reduce"]
    waiting = f"all-reduces are {share:.0f} % of a standard step"
    if gain < WORTH_IT and share > 50:
        fewer = row.speedup["desync-4x"]
        return (
            f"Do not convert {where}: {gain:.2f}x, because {waiting} and there is too little compute to hide them; "
            f"fewer ranks, a faster link, or fewer all-reduces (desync-4x: {fewer:.2f}x) would help."
        )
    if gain < WORTH_IT:
        return f"Do not convert {where}: ladder gives only {gain:.2f}x; {waiting}."
    layers, half = row.case.model.num_layers, row.speedup["ladder:last-half"]
    streams = " on two streams" if schedule == TWO_STREAM else ""
    speeds = f"{row.tokens_per_second['standard']:.0f} to {row.tokens_per_second[schedule]:.0f} tokens/s"
    sentence = (
        f"Convert {where}: ladder on all {layers} layers{streams} gives {gain:.2f}x ({speeds}), "
        f"on the last {layers // 2} layers {half:.2f}x; {waiting}"
    )
    if row.speedup["parallel"] > gain:
        sentence += f"; a model trained with parallel blocks would reach {row.speedup['parallel']:.2f}x"
    hidden = row.hidden_percent["ladder"]
    if hidden < 60:
        sentence += f"; the link stays the limit: only {hidden:.0f} % of the communication is hidden"
    return sentence + "."
