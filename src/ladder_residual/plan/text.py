"""Tables for the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table

from .fit import ASSUMED, CONSTANTS
from .planner import TWO_LANES, Case, PlanRow
from .validate import Validation

SHORT = {TWO_LANES: "2 lanes", "ladder:last-half": "last half", "delayed-1": "delayed"}


def _console() -> Console:
    # A pipe has no width; 80 columns would cut the table that a program or a log wants whole.
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=200)


def print_plan(rows: Sequence[PlanRow], case: Case) -> None:
    first = rows[0]
    console = _console()
    console.print(
        f"{first.model} on {case.device.title}, prompt {first.prompt} + {first.new} new tokens, "
        f"engine {first.engine} ({case.engine.title}). Planned, not measured."
    )
    wirings = [name for name in first.speedup if name != "standard"]
    table = Table("tp", "link", "batch", "all-reduce", "tokens/s", "ms/token", "GB/rank")
    for wiring in wirings:
        table.add_column(SHORT.get(wiring, wiring), justify="right")
    table.add_column("limited by")
    for row in rows:
        head = [str(row.tp), row.link, str(row.batch), f"{row.allreduce_us:.1f} us"]
        memory = f"{row.memory_total_gb:.1f}"
        if not row.fits:
            blank = ["-"] * len(wirings)
            table.add_row(*head, "-", "-", memory, *blank, f"does not fit {case.device.memory_gb:.0f} GB")
            continue
        speeds = [f"{row.tokens_per_second['standard']:.1f}", f"{row.ms_per_token['standard']:.2f}", memory]
        gains = [f"{row.speedup[wiring]:.2f}x" for wiring in wirings]
        limit = ", ".join(f"{part} {share:.0f} %" for part, share in sorted(row.limits.items(), key=lambda p: -p[1])[:2])
        table.add_row(*head, *speeds, *gains, limit)
    console.print(table)
    console.print("tokens/s, ms/token and limits are of the standard wiring; the rest is speed-up over it.")


def print_curve(row: PlanRow, curve: Sequence[tuple[int, float]]) -> None:
    """Speed-up against converted layers (the last k), as bars."""
    print(f"tp {row.tp}, {row.link}, batch {row.batch}: speed-up when the last k layers are ladder")
    top = max(gain for _, gain in curve)
    for k, gain in curve:
        width = round(48 * (gain - 1) / (top - 1)) if top > 1.0005 else 0
        print(f"  {k:4d} {gain:5.2f}x {'#' * width}")


def print_validation(result: Validation) -> None:
    console = _console()
    for title, role in (("Checked points", "check"), ("Fit points: constants come from these, they validate nothing", "fit")):
        table = Table("point", "quantity", "measured", "planned", "error", "target", "", title=title)
        for row in result.comparisons:
            if row.point.role == role:
                bound = row.to_dict()["target_percent"]
                error, target = f"{row.error_percent:+.1f} %", f"{bound:.0f} %" if role == "check" else ""
                values = (f"{row.point.measured:.3f}", f"{row.predicted:.3f}")
                table.add_row(row.point.name, row.point.quantity, *values, error, target, row.status)
        console.print(table)
    table = Table("target", "bound", "checked", "inside", "worst", "at", title="Summary of checked points")
    for line in result.summary():
        table.add_row(
            line["target"],
            f"{line['target_percent']:.0f} %",
            str(line["checked"]),
            str(line["inside"]),
            f"{line['worst_percent']:+.1f} %",
            line["worst_point"],
        )
    console.print(table)
    for row in result.comparisons:
        if row.status == "miss" and row.known_miss:
            console.print(f"outside its target: {row.point.name}: {row.error_percent:+.1f} %: {row.known_miss.why}")
    for sentence in result.absent:
        console.print(sentence)
    misses = sum(row.status == "miss" for row in result.comparisons)
    verdict = "PASSED" if result.passed else "FAILED"
    console.print(f"{verdict}: {len(result.checked())} checked points, {misses} outside their target with a reason given")


def print_constants(refit: Mapping[str, float] | None = None) -> None:
    table = Table("constant", "value", "refit", "meaning", "fitted on", title="Fitted constants")
    for constant in CONSTANTS:
        again = f"{refit[constant.key]:.4g}" if refit and constant.key in refit else ""
        origin = f"{constant.data}: {constant.fitted_on}"
        table.add_row(constant.key, f"{constant.shipped:.4g}", again, constant.meaning, origin)
    _console().print(table)
    assumed = Table("chosen by hand, not fitted", "value", "why")
    for row in ASSUMED:
        assumed.add_row(*row)
    _console().print(assumed)
