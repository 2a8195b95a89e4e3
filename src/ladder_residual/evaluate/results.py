"""From the harness's output to figures with their errors, and from two models' figures to differences with theirs.

Two models answer the same rows, so their difference is far better known than either figure: the paired standard error comes from
the rows' own differences. No torch here.
"""

from __future__ import annotations

import hashlib
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .tasks import Wanted

Result = dict[str, Any]  # a whole evaluation, as stored in JSON
FORMAT = "ladder-residual evaluation 1"


def harness_rows(raw: Mapping[str, Any], wanted: Sequence[Wanted]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """One row per task and metric, and every item's own values for pairing."""
    rows: list[dict[str, Any]] = []
    items: dict[str, Any] = {}
    groups = raw.get("groups", {})
    for one in wanted:
        for name in _names(raw, one.task.name):
            figures = groups.get(name) or raw["results"][name]
            members = _members(raw, name)
            shown = one.task.metric or _best_metric(figures)
            count = sum(raw["n-samples"][member]["effective"] for member in members)
            for key, value in figures.items():
                metric, _, filtered = key.partition(",")
                if not filtered or metric.endswith("_stderr") or isinstance(value, str):
                    continue
                label = _label(metric, filtered)
                error = figures.get(f"{metric}_stderr,{filtered}")
                rows.append(
                    {
                        "task": name,
                        "metric": label,
                        "shots": raw["n-shot"].get(name, raw["n-shot"].get(members[0], 0)),
                        "n": count,
                        "value": float(value),
                        "stderr": float(error) if isinstance(error, int | float) else None,
                        "higher_is_better": bool((raw["higher_is_better"].get(name) or {}).get(metric, True)),
                        "shown": label == shown,
                    }
                )
            items[name] = _items([sample for member in members for sample in raw["samples"][member]])
    return rows, items


def _names(raw: Mapping[str, Any], asked: str) -> list[str]:
    """What the harness made of a name: itself, or the tasks of a tag."""
    if asked in raw.get("groups", {}) or asked in raw["results"]:
        return [asked]
    tags = {name: config.get("tag") for name, config in raw["configs"].items()}
    return [name for name, tag in tags.items() if tag == asked or (isinstance(tag, list) and asked in tag)] or list(
        raw["results"]
    )


def _label(metric: str, filtered: str) -> str:
    """``exact_match (strict-match)``; the harness calls the filter of most metrics none."""
    return metric if filtered == "none" else f"{metric} ({filtered})"


def _members(raw: Mapping[str, Any], name: str) -> list[str]:
    children = raw.get("group_subtasks", {}).get(name) or []
    return [member for child in children for member in _members(raw, child)] if children else [name]


def _best_metric(figures: Mapping[str, Any]) -> str:
    """For a task the paper did not use: the length-normalised accuracy, or else its first metric."""
    names = [key for key in figures if "," in key and "_stderr," not in key]
    first = next((name for name in ("acc_norm,none", "acc,none") if name in names), names[0] if names else "")
    metric, _, filtered = first.partition(",")
    return _label(metric, filtered)


def _items(samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    values: dict[str, list[float]] = {}
    rows: dict[str, list[str]] = {}
    for sample in samples:
        for metric in sample["metrics"]:
            label, value = _label(metric, sample["filter"]), sample[metric]
            if isinstance(value, tuple | list):  # sums over words, not a figure of this row
                continue
            number = round(float(value), 6)
            values.setdefault(label, []).append(int(number) if number.is_integer() else number)
            rows.setdefault(label, []).append(sample["doc_hash"])
    digests = {label: hashlib.sha256("".join(hashes).encode()).hexdigest()[:16] for label, hashes in rows.items()}
    return {label: {"rows": digests[label], "values": found} for label, found in values.items()}


def paired_stderr(ours: Sequence[float], theirs: Sequence[float]) -> float | None:
    """Standard error of the mean of the rows' differences."""
    differences = [a - b for a, b in zip(ours, theirs, strict=True)]
    return statistics.stdev(differences) / math.sqrt(len(differences)) if len(differences) > 1 else None


def paired_stderr_per_token(ours: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]]) -> float | None:
    """The same for a mean over tokens, from windows of (tokens, nats): windows vary, tokens inside one are not independent."""
    count = len(ours)
    if count < 2 or [tokens for tokens, _ in ours] != [tokens for tokens, _ in theirs]:
        return None
    total = sum(tokens for tokens, _ in ours)
    differences = [(tokens, a - b) for (tokens, a), (_, b) in zip(ours, theirs, strict=True)]
    mean = math.fsum(d for _, d in differences) / total
    return math.sqrt(count / (count - 1) * math.fsum((d - mean * tokens) ** 2 for tokens, d in differences)) / total


def compare(ours: Result, theirs: Result) -> list[dict[str, Any]]:
    """Row by row: difference to ``theirs``, its error unpaired and paired, and whether it lies within one error of theirs."""
    other = {(row["task"], row["metric"]): row for row in theirs["rows"]}
    found = []
    for row in ours["rows"]:
        against = other.get((row["task"], row["metric"]))
        if against is None:
            continue
        difference = row["value"] - against["value"]
        errors = [row["stderr"], against["stderr"]]
        unpaired = math.hypot(*errors) if None not in errors else None
        paired, changed, caveat = None, None, None
        mine, its = (result["items"].get(row["task"], {}).get(row["metric"]) for result in (ours, theirs))
        same = mine and its and (mine["rows"], row["shots"]) == (its["rows"], against["shots"])
        if same and len(mine["values"]) == len(its["values"]):
            paired = paired_stderr(mine["values"], its["values"])
            changed = sum(a != b for a, b in zip(mine["values"], its["values"], strict=True)) / max(len(mine["values"]), 1)
        elif mine and its:
            caveat = "the two were given different rows or shots"
        found.append(
            {
                **{key: row[key] for key in ("task", "metric", "shown", "value", "stderr")},
                "against": against["value"],
                "against_stderr": against["stderr"],
                "difference": difference,
                "unpaired_stderr": unpaired,
                "paired_stderr": paired,
                "changed": changed,  # share of the rows whose score changed: gains and losses that cancel in the difference
                "within_one_stderr": None if against["stderr"] is None else abs(difference) <= against["stderr"],
                "caveat": caveat,
            }
        )
    return found


def compare_perplexity(ours: Result, theirs: Result) -> dict[str, Any] | None:
    mine, its = ours.get("perplexity"), theirs.get("perplexity")
    if not mine or not its:
        return None
    same = all(mine[key] == its[key] for key in ("file", "context", "stride", "tokens"))
    return {
        "difference": mine["nats_per_token"] - its["nats_per_token"],
        "paired_stderr": paired_stderr_per_token(mine["windows"], its["windows"]) if same else None,
        "caveat": None if same else "the two were given different text or windows",
    }


def save(result: Result, path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"format": FORMAT, **result}) + "\n", encoding="utf-8")
    except OSError as error:
        raise ValueError(f"cannot write {path}: {error}") from error


def load(path: str | Path) -> Result:
    try:
        result = json.loads(Path(path).read_text(encoding="utf-8"))
        if result.pop("format") != FORMAT or not isinstance(result["rows"], list):
            raise KeyError("format")
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} is no evaluation; `ladder eval ... --out FILE.json` writes one") from error
    try:  # now, and not after a model was scored to be compared with it
        for row in compare(result, result):
            float(row["value"])  # whole numbers may be beyond floats
        if "perplexity" in result and compare_perplexity(result, result) is None:
            raise ValueError("perplexity")
        for name in ("model", "date", "dtype", "gpu" if result.get("gpu") else "machine"):
            result[name]
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is damaged; missing or wrong: {str(error) or type(error).__name__:.200}") from error
    return dict(result)


def stored_result(source: str) -> Result | None:
    """The result at ``source``; None if that is a model."""
    return load(source) if source.endswith(".json") and Path(source).is_file() else None
