"""Several evaluations side by side, the first being the one the others are measured against.

python -m ladder_residual.evaluate.table before=a.json zero-shot=b.json recovered=c.json control=d.json --metric acc

No torch here: results made anywhere can be put together anywhere.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ..common import markdown
from ..common.terminal import show
from .markdown import is_share, percent, signed
from .results import Result, compare, compare_perplexity, load

Cell = tuple[str, bool | None]  # the text, and whether it lies within one standard error of the first column


def side_by_side(results: Mapping[str, Result], metric: str | None = None) -> str:
    """A Markdown table: a row per task, a column per result. ``metric`` (acc, acc_norm ...) is used by the tasks that have it;
    the others, and all if it is None, show the one the evaluation showed."""
    if len(results) < 2:
        raise ValueError(f"a comparison needs at least two results, got {len(results)}")
    (first_name, first), *others = results.items()
    compared = {name: {(row["task"], row["metric"]): row for row in compare(result, first)} for name, result in others}
    rows = _chosen_rows(results, metric)
    if not rows and not all("perplexity" in result for result in results.values()):
        raise ValueError(f"{', '.join(results)} have no task in common")
    lines = []
    for row in rows:
        cells: list[Cell] = [(percent(row["value"], row["stderr"], row["metric"]), None)]
        cells += [_cell(compared[name][row["task"], row["metric"]]) for name, _ in others]
        lines.append(_line(f"{row['task']}, {row['metric']}", row["shots"], row["n"], cells))
    shares = [row for row in rows if is_share(row["metric"]) and row["stderr"] is not None]
    if len(shares) > 1:
        lines.append(_average(shares, [compared[name] for name, _ in others]))
    if all("perplexity" in result for result in results.values()):
        lines.append(_perplexity(first, [result for _, result in others]))
    return f"{markdown.table(['task', 'shots', 'rows', *results], lines)}\n{_legend(first_name, results)}\n"


def _chosen_rows(results: Mapping[str, Result], metric: str | None) -> list[dict[str, Any]]:
    """The first result's rows that all results have, one for each task."""
    common = set.intersection(*({(row["task"], row["metric"]) for row in result["rows"]} for result in results.values()))
    first = next(iter(results.values()))
    rows = [row for row in first["rows"] if (row["task"], row["metric"]) in common]
    has_metric = {row["task"] for row in rows if row["metric"] == metric}
    return [row for row in rows if (row["metric"] == metric if row["task"] in has_metric else row["shown"])]


def _error(pair: Mapping[str, Any]) -> float | None:
    return pair["paired_stderr"] if pair["paired_stderr"] is not None else pair["unpaired_stderr"]


def _cell(pair: Mapping[str, Any]) -> Cell:
    error = _error(pair)
    change = signed(pair["difference"], pair["metric"])
    if error is not None and is_share(pair["metric"]):
        change += f" ± {100 * error:.1f}"
    return f"{percent(pair['value'], None, pair['metric'])} ({change})", pair["within_one_stderr"]


def _average(rows: list[dict[str, Any]], columns: list[dict[Any, dict[str, Any]]]) -> list[Any]:
    """Mean over the tasks. They are independent, so their errors add up as squares."""
    count = len(rows)
    value, error = sum(row["value"] for row in rows) / count, math.hypot(*(row["stderr"] for row in rows)) / count
    cells: list[Cell] = [(percent(value, error), None)]
    for column in columns:
        pairs = [column[row["task"], row["metric"]] for row in rows]
        difference = sum(pair["difference"] for pair in pairs) / count
        known = [found for found in map(_error, pairs) if found is not None]
        spread = f" ± {100 * math.hypot(*known) / count:.1f}" if len(known) == count else ""
        cells.append((f"{100 * (value + difference):.1f} ({signed(difference)}{spread})", abs(difference) <= error))
    return _line("average", "", sum(row["n"] for row in rows), cells)


def _perplexity(first: Result, others: list[Result]) -> list[Any]:
    mine = first["perplexity"]
    cells: list[Cell] = [(f"{mine['nats_per_token']:.4f}", None)]
    for result in others:
        pair = compare_perplexity(result, first)
        assert pair is not None
        error = f" ± {pair['paired_stderr']:.4f}" if pair["paired_stderr"] is not None else ""
        cells.append((f"{result['perplexity']['nats_per_token']:.4f} ({pair['difference']:+.4f}{error})", None))
    return _line(f"{mine['file']}, nats/token", "", f"{mine['tokens']:,} tokens", cells)


def _line(name: str, shots: Any, count: Any, cells: list[Cell]) -> list[Any]:
    return [name, shots, count, *(f"**{text}**" if within else text for text, within in cells)]


def _legend(first_name: str, results: Mapping[str, Result]) -> str:
    hardware = sorted({str(result.get("gpu") or result["machine"]) for result in results.values()})
    commits = sorted({str(result.get("commit")) for result in results.values()})
    dates = sorted({str(result["date"]) for result in results.values()})
    kinds = sorted({str(result["dtype"]) for result in results.values()})
    return (
        f"Accuracies in per cent with their standard error; in brackets the difference to *{first_name}* with its paired standard "
        f"error (the same rows answered by both). Bold: within one standard error of *{first_name}*. "
        f"{', '.join(dates)}, {', '.join(hardware)}, {', '.join(kinds)}, commit {', '.join(commits)}."
    )


def main() -> None:
    import argparse

    from ..distributed.launch import run_command

    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0], prog="python -m ladder_residual.evaluate.table")
    parser.add_argument("results", nargs="+", metavar="NAME=FILE.json", help="results of `ladder eval --out`")
    parser.add_argument("--metric", help="the metric to show where a task has it, e.g. acc; default: as evaluated")
    options = parser.parse_args()
    run_command(lambda: _print_table(options.results, options.metric))


def _print_table(named: Sequence[str], metric: str | None) -> None:
    results: dict[str, Result] = {}
    for part in named:
        name, equals, path = part.partition("=")
        if not equals or not name or name in results:
            raise ValueError(f"expected NAME=FILE.json with a name of its own, got {part!r}")
        results[name] = load(path)
    show(side_by_side(results, metric).removesuffix("\n"))


if __name__ == "__main__":
    main()
