"""The validation and the constants as tables for the terminal."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Console
from rich.table import Table

from lab.planner.fit import ASSUMED, CONSTANTS
from lab.planner.validate import Validation

WIDTH = 180  # what the tables need, whatever the terminal or the pipe says


def print_validation(result: Validation) -> None:
    console = Console(width=WIDTH)
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
    Console(width=WIDTH).print(table)
    assumed = Table("chosen by hand, not fitted", "value", "why")
    for row in ASSUMED:
        assumed.add_row(*row)
    Console(width=WIDTH).print(assumed)
