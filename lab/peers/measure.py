"""What a user would have otherwise, in the same run on the same card with the same weights."""

from __future__ import annotations

import gc
from collections.abc import Callable
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from ..engine.emulate import parse_link
from .gpu_report import spread
from .peers_plain import PlainGraphs
from .peers_transformers import transformers_generate, transformers_model, transformers_prefill, transformers_steps

if TYPE_CHECKING:
    from .gpu import Shard

COMPILED = "compiled blocks in one CUDA graph"
TRANSFORMERS = "transformers, static cache + compile"


class Peers:
    """Rows of those that ran, and a note on each that did not: that is a fact about the peer, not a reason to lose our rows."""

    def __init__(self, shard: Shard) -> None:
        self.shard = shard
        self.rows: list[dict[str, Any]] = []
        self.notes: list[str] = []

    def decode(self, link: str, *, batch: int, context: int, max_context: int, repeats: int) -> None:
        def compiled() -> dict[str, Any]:
            graphs = self._plain(link, batch=batch, max_context=max_context)
            return self._step_row(COMPILED, link, batch, *graphs.steps(context, repeats))

        def transformers() -> dict[str, Any]:
            asked = {"batch": batch, "context": context, "max_context": max_context, "repeats": repeats}
            return self._step_row(TRANSFORMERS, link, batch, *transformers_steps(self._transformers(), **asked))

        self._both(compiled, transformers)

    def prefill(self, link: str, *, batch: int, prompt: int, repeats: int) -> None:
        def compiled() -> dict[str, Any]:
            graphs = self._plain(link, batch=batch, max_context=prompt + 16, prompt=prompt)
            return self._ms_row(COMPILED, link, batch, graphs.prefill(repeats))

        def transformers() -> dict[str, Any]:
            times = transformers_prefill(self._transformers(), batch=batch, prompt=prompt, repeats=repeats)
            return self._ms_row("transformers", link, batch, times)

        self._both(compiled, transformers)

    def e2e(self, link: str, *, batch: int, prompt: int, new: int, repeats: int) -> None:
        def row(name: str, times: list[float]) -> dict[str, Any]:
            made = self._ms_row(name, link, batch, times)
            return {**made, "seconds": round(made["ms"] / 1e3, 4), "tokens_per_s": round(batch * new * 1e3 / made["ms"], 2)}

        def compiled() -> dict[str, Any]:
            graphs = self._plain(link, batch=batch, max_context=prompt + new + 8, prompt=prompt)
            return row(COMPILED, graphs.generate(new, repeats))

        def transformers() -> dict[str, Any]:
            asked = {"batch": batch, "prompt": prompt, "new": new, "repeats": repeats}
            return row(TRANSFORMERS, transformers_generate(self._transformers(), **asked))

        self._both(compiled, transformers)

    def compared(self, ours: list[dict[str, Any]], field: str) -> dict[str, Any]:
        """For a result: each peer's time over our standard's at the same batch and link."""
        standard = {(row["batch"], row["link"]): row[field] for row in ours if row["wiring"] == "standard"}
        for row in self.rows:
            time = standard.get((row["batch"], row["link"]))
            row["over_ours"] = round(row[field] / time, 4) if time else None
        return {"peers": self.rows, "notes": self.notes}

    def _plain(self, link: str, **sizes: int) -> PlainGraphs:
        shard = self.shard
        return PlainGraphs(shard.spec, shard.sizes, shard.weights, parse_link(link, tp=shard.tp), **sizes)

    def _transformers(self) -> Any:
        return transformers_model(self.shard.spec, self.shard.weights)

    def _both(self, compiled: Callable[[], dict[str, Any]], transformers: Callable[[], dict[str, Any]]) -> None:
        self._try(COMPILED, compiled)
        if self.shard.tp == 1:
            self._try("transformers", transformers)
        else:
            self._note("transformers does not run as one emulated rank of several: it is a peer at tp=1 only")

    @staticmethod
    def _step_row(name: str, link: str, batch: int, times: list[float], warm_up: float) -> dict[str, Any]:
        step = round(median(times), 4)
        rate, warm = round(batch * 1e3 / step, 1), round(warm_up, 2)
        named = {"batch": batch, "link": link, "engine": name}
        return {**named, "ms_per_token": step, **spread(times), "tokens_per_s": rate, "startup_s": warm}

    @staticmethod
    def _ms_row(name: str, link: str, batch: int, times: list[float]) -> dict[str, Any]:
        return {"batch": batch, "link": link, "engine": name, "ms": round(median(times), 3), **spread(times)}

    def _try(self, name: str, measure: Callable[[], dict[str, Any]]) -> None:
        try:
            self.rows.append(measure())
        except Exception as error:
            self._note(f"{name} did not run: {type(error).__name__}: {str(error)[:200]}")
        torch.compiler.reset()
        gc.collect()  # compiled code and its model point at each other
        torch.cuda.empty_cache()

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)


def bench_peers(
    *, model: str = "llama-3.1-8b", context: int = 1100, repeats: int = 40, layers: int | None = None
) -> dict[str, Any]:
    """One GPU, batch 1, whole model: our engine and its peers in one table."""
    from .gpu import bench_decode

    result = bench_decode(
        model=model, tp=1, wirings=("standard", "ladder"), links=("none",), context=context, max_context=2048,
        repeats=repeats, layers=layers, peers=True,
    )  # fmt: skip
    kept = ("ms_per_token", "p10_ms", "p90_ms", "runs", "roofline_share", "startup_s")
    ours = [{"engine": f"ladder-residual, {row['wiring']}", **row} for row in result["rows"]]
    rows = [{"engine": row["engine"], **{name: row[name] for name in kept}} for row in [*ours, *result.pop("peers")]]
    return {**result, "benchmark": "peers", "rows": rows}
