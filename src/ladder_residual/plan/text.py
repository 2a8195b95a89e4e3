"""What ``ladder plan`` prints: the verdict, a table that fits the terminal, and where a decode step's time goes."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from .advice import best_row, dtypes_of, verdict
from .planner import TWO_STREAM, PlanRow

# A break where a heading may become two lines; they make 14 columns fit 120 characters.
HEADINGS = {TWO_STREAM: "two-\nstream", "ladder:last-half": "last\nhalf", "desync-2x": "desync\n2x", "desync-4x": "desync\n4x"}
PARTS = {  # of a step: (block, character of a terminal without blocks, colour, meaning)
    "compute": ("█", "#", "blue", "compute"),
    "hidden": ("▓", "=", "green", "compute, an all-reduce hidden behind it"),
    "exposed": ("░", ".", "red", "waiting for an all-reduce"),
}


def print_plan(rows: Sequence[PlanRow], *, wide: bool = False) -> None:
    """``wide`` prints every column and every case's bars, however many characters a line takes."""
    console = Console(highlight=False)
    first, case = rows[0], rows[0].case
    console.print(verdict(rows), style="bold", markup=False)
    console.print(
        f"\n{first.model} on {case.device.title or first.device}, prompt {first.prompt} + {first.new} new tokens{dtypes_of(first)}, "
        f"engine {first.engine} ({case.engine.title}). Planned, not measured.\n",
        markup=False,
    )
    full, short = (wirings_as_columns(rows, every=every) for every in (True, False))
    if wide:
        console.width = max(console.width, _width(full))
    if (columns := next((table for table in (full, short) if _width(table) <= console.width), None)) is not None:
        console.print(columns)
        console.print("Speeds and ms/token are of the standard wiring; the wirings' columns are speed-ups over it.")
    elif len(rows) == 1:
        console.print(wirings_of_one_case(first))
        console.print(f"{_allreduce(first)} an all-reduce, {first.memory_total_gb:.1f} GB per rank.")
    else:
        _print_groups(console, rows)
    with_allreduce = columns is full or (columns is None and len(rows) == 1)
    if with_allreduce and any(row.in_situ_us for row in rows):
        console.print("all-reduce: time in a loop of nothing else + extra time of a call inside a model.")
    for row in [row for row in rows if row.fits] if wide else [best_row(rows)]:
        print_bars(console, row)
    if wide and len(rows) > 1:
        console.print()
        for row in rows:
            console.print(row.advice, markup=False)


def _table(*columns: str) -> Table:
    return Table(*columns, box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1), collapse_padding=True)


def _width(table: Table) -> int:
    """Characters of a line if nothing is cut."""
    console = Console(width=10_000)
    return Measurement.get(console, console.options, table).maximum


def wirings_as_columns(rows: Sequence[PlanRow], *, every: bool) -> Table:
    """A row for each case; ``every`` adds the all-reduce and what limits a step."""
    wirings = [name for name in rows[0].speedup if name != "standard"]
    table = _table()
    for name in ("tp", "link", "batch", *(["all-reduce"] if every else []), "tokens/s", "ms per\ntoken", "GB per\nrank"):
        table.add_column(name, justify="left" if name == "link" else "right", no_wrap=True)
    for wiring in wirings:
        table.add_column(HEADINGS.get(wiring, wiring), justify="right", no_wrap=True)
    if every:
        table.add_column("limited by", no_wrap=True)
    for row in rows:
        head = [str(row.tp), row.link, str(row.batch), *([_allreduce(row)] if every else [])]
        memory = f"{row.memory_total_gb:.1f}"
        if not row.fits:
            speeds, gains, limit = ["-", "-"], ["-"] * len(wirings), f"does not fit {row.case.device.memory_gb:.0f} GB"
        else:
            speeds = [f"{row.tokens_per_second['standard']:.1f}", f"{row.ms_per_token['standard']:.2f}"]
            gains = [f"{row.speedup[wiring]:.2f}x" for wiring in wirings]
            limit = ", ".join(f"{part} {share:.0f} %" for part, share in sorted(row.limits.items(), key=lambda p: -p[1])[:2])
        table.add_row(*head, *speeds, memory, *gains, *([limit] if every else []))
    return table


def wirings_of_one_case(row: PlanRow) -> Table:
    table = _table()
    table.add_column("wiring", no_wrap=True)
    for name in ("tokens/s", "speed-up", "ms/token", "all-reduces hidden"):
        table.add_column(name, justify="right", no_wrap=True)
    for wiring, speed in row.tokens_per_second.items():
        hidden = "none sent" if wiring == "no-comm" or row.tp == 1 else f"{row.hidden_percent[wiring]:.0f} %"
        table.add_row(wiring, f"{speed:.1f}", f"{row.speedup[wiring]:.2f}x", f"{row.ms_per_token[wiring]:.2f}", hidden)
    return table


def _print_groups(console: Console, rows: Sequence[PlanRow]) -> None:
    """Wirings as rows and cases as columns, as many beside each other as fit."""
    start = 0
    while start < len(rows):
        end = len(rows)
        while end > start + 1 and _width(wirings_as_rows(rows[start:end])) > console.width:
            end -= 1
        console.print(wirings_as_rows(rows[start:end]), "")
        start = end
    console.print("Speed-ups over the standard wiring; ms/token is of a standard step.")
    for row in rows:
        if not row.fits:
            console.print(f"tp {row.tp}, {row.link}, batch {row.batch} does not fit {row.case.device.memory_gb:.0f} GB.")


def wirings_as_rows(rows: Sequence[PlanRow]) -> Table:
    table = _table("")
    for row in rows:
        table.add_column(f"tp {row.tp}\n{row.link}\nbatch {row.batch}", justify="right", no_wrap=True)

    def line(name: str, cells: Sequence[str]) -> None:
        table.add_row(name, *("-" if not row.fits else cell for row, cell in zip(rows, cells, strict=True)))

    line("standard, tokens/s", [f"{row.tokens_per_second['standard']:.1f}" for row in rows])
    line("standard, ms/token", [f"{row.ms_per_token['standard']:.2f}" for row in rows])
    table.add_row("GB per rank", *(f"{row.memory_total_gb:.1f}" for row in rows), end_section=True)
    for wiring in rows[0].speedup:
        if wiring != "standard":
            line(wiring, [f"{row.speedup[wiring]:.2f}x" for row in rows])
    return table


def print_bars(console: Console, row: PlanRow) -> None:
    """Where a decode step's time goes, a bar for each wiring."""
    console.print(f"\nWhere a decode step goes (tp {row.tp}, {row.link}, batch {row.batch}), in ms", style="bold", markup=False)
    column = 1 if console.options.ascii_only else 0
    longest, name = max(row.ms_per_token.values()), max(map(len, row.step_ms))
    room = max(10, min(console.width, 120) - name - 10)
    for wiring, parts in row.step_ms.items():
        console.print(
            Text.assemble(f"{wiring:{name}} ", *_bar(parts, room / longest, column), f" {row.ms_per_token[wiring]:.2f}")
        )
    for part in PARTS.values():
        console.print(Text.assemble((part[column] * 2, part[2]), f" {part[3]}"))


def _bar(parts: dict[str, float], scale: float, column: int) -> list[tuple[str, str]]:
    """Ends of the parts are rounded, not their lengths: so bars of equal time are equally long."""
    bar, at = [], 0.0
    for name, ms in parts.items():
        bar.append((PARTS[name][column] * (round((at + ms) * scale) - round(at * scale)), PARTS[name][2]))
        at += ms
    return bar


def _allreduce(row: PlanRow) -> str:
    """The all-reduce itself + what it costs more inside a model."""
    return f"{row.allreduce_us:.1f}{f' + {row.in_situ_us:.1f}' if row.in_situ_us else ''} us"


def print_curve(row: PlanRow, curve: Sequence[tuple[int, float]]) -> None:
    """Speed-up against converted layers (the last k), as bars."""
    print(f"\ntp {row.tp}, {row.link}, batch {row.batch}: speed-up when the last k layers are ladder")
    top = max(gain for _, gain in curve)
    for k, gain in curve:
        width = round(48 * (gain - 1) / (top - 1)) if top > 1.0005 else 0
        print(f"  {k:4d} {gain:5.2f}x {'#' * width}")
