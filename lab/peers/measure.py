"""What a user would have otherwise, on the same card with the same weights, after the CUDA engine's own benchmark."""

from __future__ import annotations

import gc
import itertools
import sys
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch

from lab.peers.plain import PlainGraphs
from lab.peers.transformers_models import transformers_generate, transformers_model, transformers_prefill, transformers_steps
from ladder_residual.bench.engine import bench_decode, bench_e2e, bench_prefill, links_of
from ladder_residual.bench.timing import spread
from ladder_residual.engine.random_rank import RandomRank
from ladder_residual.links import parse_link
from ladder_residual.plan.models import resolve_model

COMPILED = "compiled blocks in one CUDA graph"
TRANSFORMERS = "transformers, static cache + compile"


class Peers:
    """Rows of those that ran. One that fails is named with its error; transformers is measured at tp=1 only, as it does not run as one
    emulated rank of several."""

    def __init__(self, rank: RandomRank) -> None:
        self.rank = rank
        self.rows: list[dict[str, Any]] = []
        self.failed: dict[str, str] = {}

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

    def beside(self, result: dict[str, Any], field: str) -> dict[str, Any]:
        """The result with the peers' rows: each peer's time over our standard's at the same batch and link."""
        standard = {(row["batch"], row["link"]): row[field] for row in result["rows"] if row["wiring"] == "standard"}
        for row in self.rows:
            time = standard.get((row["batch"], row["link"]))
            row["over_ours"] = round(row[field] / time, 4) if time else None
        return {**result, "peers": self.rows, "peers_failed": self.failed}

    def _plain(self, link: str, **sizes: int) -> PlainGraphs:
        rank = self.rank
        return PlainGraphs(rank.spec, rank.sizes, rank.weights, parse_link(link, tp=rank.tp), **sizes)

    def _transformers(self) -> Any:
        return transformers_model(self.rank.spec, self.rank.weights)

    def _both(self, compiled: Callable[[], dict[str, Any]], transformers: Callable[[], dict[str, Any]]) -> None:
        self.attempt(COMPILED, compiled)
        if self.rank.tp == 1:
            self.attempt("transformers", transformers)

    @staticmethod
    def _step_row(name: str, link: str, batch: int, times: list[float], warm_up: float) -> dict[str, Any]:
        step = round(median(times), 4)
        rate, warm = round(batch * 1e3 / step, 1), round(warm_up, 2)
        named = {"batch": batch, "link": link, "engine": name}
        return {**named, "ms_per_token": step, **spread(times), "tokens_per_s": rate, "startup_s": warm}

    @staticmethod
    def _ms_row(name: str, link: str, batch: int, times: list[float]) -> dict[str, Any]:
        return {"batch": batch, "link": link, "engine": name, "ms": round(median(times), 3), **spread(times)}

    def attempt(self, name: str, measure: Callable[[], dict[str, Any]]) -> None:
        try:
            self.rows.append(measure())
        except Exception as error:
            print(f"{name} failed: {type(error).__name__}: {error}", file=sys.stderr)
            self.failed[name] = type(error).__name__
        torch.compiler.reset()
        gc.collect()  # compiled code and its model point at each other
        torch.cuda.empty_cache()


def decode_and_peers(
    rank: RandomRank, *, batches: Sequence[int] = (1,), links: Sequence[str] = ("none", "24us"), context: int = 1280,
    max_context: int | None = None, repeats: int = 40, **options: Any,
) -> dict[str, Any]:  # fmt: skip
    """``bench_decode``, then the peers' steps."""
    sizes: dict[str, Any] = {"context": context, "max_context": max_context or max(2 * context, 2048), "repeats": repeats}
    result = bench_decode(rank=rank, tp=rank.tp, batches=batches, links=links, **sizes, **options)
    peers = Peers(rank)
    for batch, link in itertools.product(batches, links_of(links, rank.tp)):
        peers.decode(link, batch=batch, **sizes)
    for row in peers.rows:
        floor_ms = rank.bytes_per_step(row["batch"], context) / result["read_bandwidth_tb_s"] / 1e9
        row["roofline_share"] = round(floor_ms / row["ms_per_token"], 4)
    return peers.beside(result, "ms_per_token")


def prefill_and_peers(
    rank: RandomRank, *, batches: Sequence[int] = (1,), links: Sequence[str] = ("none", "500us"), prompt: int = 1024,
    repeats: int = 5, **options: Any,
) -> dict[str, Any]:  # fmt: skip
    """``bench_prefill``, then the peers' prompts."""
    result = bench_prefill(rank=rank, tp=rank.tp, batches=batches, links=links, prompt=prompt, repeats=repeats, **options)
    peers = Peers(rank)
    for batch, link in itertools.product(batches, links_of(links, rank.tp)):
        peers.prefill(link, batch=batch, prompt=prompt, repeats=repeats)
    return peers.beside(result, "ms")


def e2e_and_peers(
    rank: RandomRank, *, batches: Sequence[int] = (1,), links: Sequence[str] = ("24us",), prompt: int = 1024, new: int = 512,
    repeats: int = 3, **options: Any,
) -> dict[str, Any]:  # fmt: skip
    """``bench_e2e``, then the peers' whole generations."""
    sizes: dict[str, Any] = {"prompt": prompt, "new": new, "repeats": repeats}
    result = bench_e2e(rank=rank, tp=rank.tp, batches=batches, links=links, **sizes, **options)
    peers = Peers(rank)
    for batch, link in itertools.product(batches, links_of(links, rank.tp)):
        peers.e2e(link, batch=batch, **sizes)
    return peers.beside(result, "seconds")


def whole_model(
    *, model: str = "llama-3.1-8b", context: int = 1100, repeats: int = 40, layers: int | None = None
) -> dict[str, Any]:
    """One GPU, batch 1, whole model: our engine and its peers as rows of one table."""
    rank = RandomRank(*resolve_model(model), 1, layers=layers)
    result = decode_and_peers(rank, links=("none",), context=context, max_context=2048, repeats=repeats)
    kept = ("ms_per_token", "p10_ms", "p90_ms", "runs", "roofline_share", "startup_s")
    ours = [{"engine": f"ladder-residual, {row['wiring']}", **row} for row in result["rows"]]
    rows = [{"engine": row["engine"], **{name: row[name] for name in kept}} for row in [*ours, *result.pop("peers")]]
    return {**result, "benchmark": "peers", "rows": rows}
