"""Results of ``lab.serving.gpu`` as three tables: times, ways to run an all-reduce, tokens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from statistics import median
from typing import Any

from lab.serving.gpu_judge import QUANTISED
from ladder_residual.common.markdown import table

# In the order of the rows.
SETUPS = {
    "tp1": "one rank",
    "ipc": "IPC",
    "nccl": "NCCL",
    "load": "NCCL",
    "nccl-graphs": "NCCL, decode graphs",
    "ipc-overlap": "IPC",
    "nccl-overlap": "NCCL",
    "emulated": "70B",
}
OWN = "own"
TIMES = (
    "Llama-3.1-8B shape, bf16, random weights, prompts of 256 tokens; medians of ms per token or to the first token of a prompt; each load "
    "once, 32 requests. IPC is vLLM's own all-reduce; NCCL goes over sockets, where ladder's all-reduces take turns on two communicators. "
    "Two ranks share one card and its memory bandwidth, so only ratios count."
)
WAYS = (
    "`VLLM_LADDER_OVERLAP=never` and `always`. 70B: a rank of 8 of Llama-3-70B, alone; where it would all-reduce it copies, and takes the "
    "time named."
)
TOKENS = (
    "Greedy tokens of a small random model, each judged after the engine's own tokens before it. Arithmetic of fewer bits costs some, fp8 "
    "activations most: vLLM's own model says how many."
)


def sections(results: Iterable[Mapping[str, Any]]) -> list[tuple[str, str, str]]:
    """(title, reading, table) of what was measured; of a part that is in several results, the last."""
    parts: dict[str, Any] = {}
    for result in results:
        parts |= {name: part for name, part in result["parts"].items() if part.get("rows") or part.get("tokens")}
    tables = (
        ("Real vLLM on one GPU", TIMES, times_table(parts)),
        ("Beside the modules or in line", WAYS, ways_table(parts)),
        ("Tokens that float32 would choose", TOKENS, tokens_table(parts)),
    )
    return [each for each in tables if each[2]]


def times_table(parts: Mapping[str, Any]) -> str:
    """vLLM's own model against the plugin that chooses for itself."""
    rows = []
    for setup, name, times in _measured(parts):
        if OWN in times and None in times:
            own, ladder = times[OWN], times[None]
            runs = (
                f"{len(own)}" if len(own) < 2 else f"{len(own)}: {min(own) / max(ladder):.2f}x to {max(own) / min(ladder):.2f}x"
            )
            speedup = f"{median(own) / median(ladder):.2f}x"
            rows.append([setup, name, f"{median(own):.2f}", f"{median(ladder):.2f}", speedup, runs])
    return table(["", "", "vLLM's own, ms", "ladder, ms", "speed-up", "rounds: least to greatest"], rows) if rows else ""


def ways_table(parts: Mapping[str, Any]) -> str:
    """Always beside the modules against always in line."""
    rows = []
    for setup, name, times in _measured(parts):
        if "always" in times and "never" in times:
            own = f"{median(times[OWN]):.2f}" if OWN in times else ""
            rows.append([setup, name, own, *(f"{median(times[way]):.2f}" for way in ("never", "always"))])
    return table(["", "", "vLLM's own, ms", "in line, ms", "beside, ms"], rows) if rows else ""


def _measured(parts: Mapping[str, Any]) -> Iterable[tuple[str, str, dict[str | None, list[float]]]]:
    """(setup, measurement, milliseconds of each round by what was chosen for the engine)."""
    for part, setup in SETUPS.items():
        engines = parts.get(part, {}).get("engines", {})
        for row in parts.get(part, {}).get("rows", []):
            chosen = {name: OWN if engine["wiring"] == OWN else engine["overlap"] for name, engine in engines.items()}
            samples = row.get("samples", {})
            yield setup, row["name"], {chosen[name]: [each["ms"] for each in some] for name, some in samples.items() if some}


def tokens_table(parts: Mapping[str, Any]) -> str:
    rows = []
    for part in parts.values():
        for name, found in part.get("tokens", {}).items():
            engine = part["engines"][name]
            ranks = "one rank" if engine["tp"] == 1 else f"{engine['tp']} ranks, {engine['transport']}"
            way = {None: "", "always": ", beside", "never": ", in line"}[engine["overlap"]]
            way += ", piecewise graphs" if engine.get("graphs") == "PIECEWISE" else ""
            model = "vLLM's own" if engine["wiring"] == OWN else engine["wiring"] + way
            share = found.get("message") or f"{found['chosen']} of {found['of']}"
            rows.append([model, engine["model"].partition("-")[2] if engine["model"] in QUANTISED else "bf16", ranks, share])
    return table(["model", "weights", "ranks", "tokens"], rows) if rows else ""
