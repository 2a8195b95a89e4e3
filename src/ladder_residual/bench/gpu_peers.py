"""What a user would have otherwise, in the same run on the same card with the same weights."""

from __future__ import annotations

import gc
from collections.abc import Callable
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from ..engine.emulate import Link, parse_link
from .gpu_report import spread
from .peers_plain import plain_steps
from .peers_transformers import transformers_generate, transformers_model, transformers_prefill, transformers_steps

if TYPE_CHECKING:
    from .gpu import Shard

COMPILED = "compiled blocks in one CUDA graph"
TRANSFORMERS = "transformers, static cache + compile"
_SHARED = "transformers does not run as one emulated rank of several: it is a peer at tp=1 only"


class Peers:
    """Rows of those that ran, and a note on each that did not: that is a fact about the peer, not a reason to lose our rows."""

    def __init__(self, shard: Shard) -> None:
        self.shard = shard
        self.rows: list[dict[str, Any]] = []
        self.notes: list[str] = []

    def decode(self, link_name: str, *, batch: int, context: int, max_context: int, repeats: int) -> None:
        shard, link = self.shard, parse_link(link_name, tp=self.shard.tp)
        alike: dict[str, Any] = {"batch": batch, "context": context, "max_context": max_context, "repeats": repeats}
        self._step_row(COMPILED, link_name, batch, lambda: self._plain(link, alike))
        if shard.tp == 1:
            self._step_row(TRANSFORMERS, link_name, batch, lambda: transformers_steps(self._transformers(), **alike))
        else:
            self._note(_SHARED)

    def prefill(self, link_name: str, *, batch: int, prompt: int, repeats: int) -> None:
        sizes: dict[str, Any] = {"batch": batch, "prompt": prompt, "repeats": repeats}
        name = "transformers"
        self._whole(name, lambda: self._ms_row(name, link_name, sizes, transformers_prefill(self._transformers(), **sizes)))

    def e2e(self, link_name: str, *, batch: int, prompt: int, new: int, repeats: int) -> None:
        sizes: dict[str, Any] = {"batch": batch, "prompt": prompt, "new": new, "repeats": repeats}

        def measure() -> dict[str, Any]:
            times = transformers_generate(self._transformers(), **sizes)
            row = self._ms_row(TRANSFORMERS, link_name, sizes, times)
            return {**row, "seconds": round(row["ms"] / 1e3, 4), "tokens_per_s": round(batch * new * 1e3 / row["ms"], 2)}

        self._whole(TRANSFORMERS, measure)

    def compared(self, ours: list[dict[str, Any]], field: str) -> dict[str, Any]:
        """For a result: each peer's time over our standard's at the same batch and link."""
        standard = {(row["batch"], row["link"]): row[field] for row in ours if row["wiring"] == "standard"}
        for row in self.rows:
            time = standard.get((row["batch"], row["link"]))
            row["over_ours"] = round(row[field] / time, 4) if time else None
        return {"peers": self.rows, "notes": self.notes}

    def _plain(self, link: Link, alike: dict[str, Any]) -> tuple[list[float], float]:
        return plain_steps(self.shard.spec, self.shard.sizes, self.shard.weights, link, **alike)

    def _transformers(self) -> Any:
        return transformers_model(self.shard.spec, self.shard.weights)

    def _whole(self, name: str, measure: Callable[[], dict[str, Any]]) -> None:
        if self.shard.tp > 1:
            self._note(_SHARED)
        else:
            self._try(name, measure)

    def _step_row(self, name: str, link: str, batch: int, measure: Callable[[], tuple[list[float], float]]) -> None:
        def row() -> dict[str, Any]:
            times, warm_up = measure()
            step = round(median(times), 4)
            rate = round(batch * 1e3 / step, 1)
            warm = round(warm_up, 2)
            named = {"batch": batch, "link": link, "engine": name}
            return {**named, "ms_per_token": step, **spread(times), "tokens_per_s": rate, "startup_s": warm}

        self._try(name, row)

    @staticmethod
    def _ms_row(name: str, link: str, sizes: dict[str, Any], times: list[float]) -> dict[str, Any]:
        return {"batch": sizes["batch"], "link": link, "engine": name, "ms": round(median(times), 3), **spread(times)}

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
