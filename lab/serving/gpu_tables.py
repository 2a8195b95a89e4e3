"""The result of ``lab.serving.gpu`` as tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ladder_residual.common.markdown import table

TITLES = {
    "nccl": "Two ranks, NCCL over sockets",
    "ipc": "Two ranks, vLLM's own all-reduce",
    "tp1": "One rank",
    "nccl-overlap": "Two ranks, NCCL over sockets: always beside, never beside",
    "ipc-overlap": "Two ranks, vLLM's own all-reduce: always beside, never beside",
    "nccl-graphs": "Two ranks, NCCL over sockets, CUDA graphs for decode alone",
    "load": "Two ranks, NCCL over sockets, requests that arrive at random",
    "emulated": "One rank of 8 of Llama-3-70B, all-reduces emulated",
    "parity": "Tokens",
    "fp8": "Tokens of fp8 weights",
    "int4": "Tokens of int4 weights",
    "wirings": "Tokens of other wirings",
}
OWN = "own"


MODEL = "Llama-3.1-8B shape, bf16, random weights; medians of alternating measurements, prompts of 256 tokens."
SHARED = "Both ranks share one card, its multiprocessors and its memory bandwidth, so only ratios count."
RANK_OF_70B = "Medians of alternating measurements; wherever the rank would all-reduce it copies, and takes the time named."
TOKENS = (
    "Greedy tokens of a small random model, each judged after the engine's own tokens before it. 16-bit arithmetic alone costs a few: "
    "vLLM's own model says how many."
)


def reading(name: str, of_tokens: bool) -> str:
    if of_tokens:
        return TOKENS
    if name == "emulated":
        return RANK_OF_70B
    return MODEL if name == "tp1" else f"{MODEL} {SHARED}"


def sections(result: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """(title, reading, table) of each part that has something to show."""
    found = []
    for name, title in TITLES.items():
        part = result["parts"].get(name, {})
        if part.get("tokens"):
            found.append((title, reading(name, True), tokens_table(part)))
        if any(row.get("ms") for row in part.get("rows", [])):
            found.append((title, reading(name, False), times_table(part)))
    return found


def times_table(part: Mapping[str, Any]) -> str:
    """Milliseconds by engine, and how much faster than vLLM's own model (if it took part)."""
    engines = [name for name in part["engines"] if any(name in row.get("ms", {}) for row in part["rows"])]
    own = next((name for name in engines if part["engines"][name]["wiring"] == OWN), None)
    others = [name for name in engines if name != own]
    head = [
        "ms",
        *(_named(part["engines"][name]) for name in engines),
        *(f"{_named(part['engines'][name])}, speed-up" for name in others),
    ]
    rows = []
    for row in part["rows"]:
        times = row.get("ms", {})
        if not times:
            continue
        cells = [f"{times[name]:.2f}" if name in times else "" for name in engines]
        gains = [f"{times[own] / times[name]:.2f}x" if own in times and name in times else "" for name in others]
        rows.append([row["name"], *cells, *gains])
    if own is None:
        head, rows = head[: 1 + len(engines)], [row[: 1 + len(engines)] for row in rows]
    return table(head, rows)


def tokens_table(part: Mapping[str, Any]) -> str:
    """How many greedy tokens are those that float32 would choose."""
    rows = []
    for name, found in part["tokens"].items():
        engine = part["engines"][name]
        ranks = "one rank" if engine["tp"] == 1 else f"{engine['tp']} ranks, {engine['transport']}"
        share = found.get("error") or f"{found['chosen']} of {found['of']}"
        rows.append([_named(engine), ranks, share])
    return table(["model", "", "tokens that float32 would choose"], rows)


def _named(engine: Mapping[str, Any]) -> str:
    if engine["wiring"] == OWN:
        return "vLLM's own"
    return engine["wiring"] + {None: "", "always": ", beside", "never": ", in line"}[engine["overlap"]]
