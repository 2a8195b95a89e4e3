"""Evaluations as Markdown: one model, or one against another. No torch here."""

from __future__ import annotations

import math
from typing import Any

from ..common.markdown import table
from .results import Result

_ROW = ("task", "shots", "n", "metric")  # what identifies a row of the tables


def percent(value: float, error: float | None = None, metric: str = "") -> str:
    """A share as per cent with its standard error; other metrics (perplexities) as they are."""
    if not is_share(metric):
        return f"{value:.3f}" if math.isfinite(value) else str(value)
    return f"{100 * value:.1f}" + (f" ± {100 * error:.1f}" if error is not None else "")


def is_share(metric: str) -> bool:
    return "perplexity" not in metric and not metric.startswith(("bits_per_byte", "ppl"))


def signed(value: float, metric: str = "") -> str:
    return f"{100 * value:+.1f}" if is_share(metric) else f"{value:+.3f}"


def render(result: Result) -> str:
    """The whole page: tables, caveats, and what the figures were made with."""
    lines = [f"## {result['model']}" + (f" against {result['against']['model']}" if "against" in result else ""), ""]
    if result["rows"]:
        lines.append(_against_table(result) if "against" in result else _table(result))
    if "perplexity" in result:
        lines += [*_perplexity_lines(result), ""]
    caveats = [f"- {name}: {caveat}" for name, found in result["caveats"].items() for caveat in found]
    lines += ([*caveats, ""] if caveats else []) + [_made_with(result)]
    return "\n".join(lines) + "\n"


def _table(result: Result) -> str:
    shown = [row for row in result["rows"] if row["shown"]]
    rows = [[*(row[key] for key in _ROW), percent(row["value"], row["stderr"], row["metric"])] for row in shown]
    return table(["task", "shots", "rows", "metric", "value, %"], rows)


def _against_table(result: Result) -> str:
    header = ["task", "shots", "rows", "metric", "this model, %", "against, %", "difference", "paired s.e.", "unpaired s.e."]
    lines = []
    by_name = {(row["task"], row["metric"]): row for row in result["rows"]}
    for pair in result["comparison"]:
        if not pair["shown"]:
            continue
        row, metric = by_name[pair["task"], pair["metric"]], pair["metric"]
        values = percent(row["value"], row["stderr"], metric), percent(pair["against"], pair["against_stderr"], metric)
        # Results of earlier versions do not say how many rows changed.
        paired, unpaired, changed = (
            "" if share is None else f"{100 * share:.1f}"
            for share in (pair["paired_stderr"], pair["unpaired_stderr"], pair.get("changed"))
        )
        within = {True: "yes", False: "no", None: ""}[pair["within_one_stderr"]]
        difference = signed(pair["difference"], metric)
        lines.append([*(row[key] for key in _ROW), *values, difference, paired, unpaired, changed, within])
    return table([*header, "rows changed, %", "within one s.e."], lines)


def _perplexity_lines(result: Result) -> list[str]:
    found = result["perplexity"]
    lines = [
        f"Perplexity of {found['file']}, context {found['context']}, stride {found['stride']}: "
        f"{found['tokens']:,} tokens, {found['nats_per_token']:.4f} nats/token, {found['ppl']:.2f} per token, "
        f"{found['word_ppl']:.2f} per word, {found['bits_per_byte']:.4f} bits/byte."
    ]
    if result.get("perplexity_comparison"):
        pair, its = result["perplexity_comparison"], result["against"]["perplexity"]
        error = f" ± {pair['paired_stderr']:.4f} (paired)" if pair["paired_stderr"] is not None else ""
        lines.append(f"Against {its['nats_per_token']:.4f} nats/token: {pair['difference']:+.4f}{error} nats/token.")
    return lines


def _made_with(result: Result) -> str:
    facts: list[Any] = [result["date"], f"wiring {result['wiring']}", result["dtype"], f"tp {result['tp']}"]
    facts += [result.get("gpu") or result["machine"], f"torch {result['torch']}"]
    facts += [f"lm-eval {result['lm_eval']}"] if result.get("lm_eval") else []
    facts += [f"first {result['limit']} rows of each task"] if result.get("limit") else []
    return ", ".join(map(str, facts)) + f", commit {result.get('commit')}."
