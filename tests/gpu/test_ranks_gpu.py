"""The engine and training on several real ranks of this machine's GPUs; on one GPU they share it.

``PYTHONPATH=src:. python tests/gpu/test_ranks_gpu.py`` runs it from a clone without pytest; ``2 4 --seconds 150 --out DIR`` on two ranks
and on four, each for so long at most, and writes what was compared. It fails unless all was.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ladder_residual.common.environment import environment
from ladder_residual.core.config import Wiring
from ladder_residual.distributed import shared_gpu
from ladder_residual.distributed.launch import launch, launched, run_command
from ladder_residual.distributed.world import World, distributed
from ladder_residual.engine import DecodeEngine, EngineSpec, RankSizes, random_weights, stack_weights
from ladder_residual.engine.ops.tiles import GemvTiles
from ladder_residual.engine.reducer_choice import choose_reducers
from ladder_residual.engine.weights import RankWeights
from ladder_residual.links import parse_link
from tests.engine.reference import ReferenceDecoder
from tests.gpu.rank_cases import BATCHES, WIRINGS, Case, Deadline, all_cases, share
from tests.gpu.test_engine_gpu import SHAPE, TOLERANCE, relative

try:
    import pytest

    pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
    each_count = pytest.mark.parametrize("ranks", [2, 4, 8])
except ImportError:  # a bare machine: main() below starts the ranks

    def each_count(function):  # type: ignore[no-redef, misc]
        return function


SMALL = replace(SHAPE, num_kv_heads=4)
PROMPT, STEPS = 70, 2


@each_count
def test_real_ranks(ranks: int) -> None:
    """In processes of their own: CUDA does not work in a fork."""
    shared_gpu.share_gpu()
    assert launch([str(ranks)], ranks, "tests.gpu.test_ranks_gpu") == 0


class Ranks:
    """The small model on all ranks, and what its cases are made of."""

    def __init__(self, world: World, groups: tuple) -> None:
        self.world, self.groups, self.spec = world, groups, EngineSpec.from_shape(SMALL)
        self.weights = weights_of_all_ranks(self.spec, world)
        self.sizes = RankSizes.of(SMALL, world.size, world.rank)
        generator = torch.Generator("cuda").manual_seed(0)
        self.tokens = {
            batch: torch.randint(0, SMALL.vocab_size, (batch, PROMPT + STEPS), generator=generator, device="cuda")
            for batch in BATCHES
        }

    def logits(self, case: Case, **reducer: Any) -> list[torch.Tensor]:
        """After a prompt and two steps."""
        world, tokens = self.world, self.tokens[case.batch]
        tiles = GemvTiles.candidates(self.sizes, 80)[0] if case.batch == 1 and case.schedule != "interleaved" else None
        engine = DecodeEngine(
            self.spec, Wiring.parse(case.wiring, SMALL.num_layers), self.weights[world.rank], tp=world.size, rank=world.rank,
            batch=case.batch, max_context=80, schedule=case.schedule, gemm_backend="cublas", tiles=tiles, **reducer,
        )  # fmt: skip
        wanted = reducer["reducer"]
        assert engine.reducer.name == wanted, f"{wanted} was asked for, {engine.reducer.name} is used"
        found = [engine.gather(engine.prefill(tokens[:, :PROMPT])).clone()]
        return found + [engine.gather(engine.decode(tokens[:, PROMPT + step])).clone() for step in range(STEPS)]

    def compile(self, cases: Sequence[Case]) -> None:
        """Each rank alone runs a share of the cases, so that Triton's cache on disk has the kernels of all. In step every rank would
        compile every kernel."""
        alone = list(dict.fromkeys(case._replace(reducer="emulated") for case in cases))
        for case in share(alone, self.world.rank, self.world.size):
            self.logits(case, reducer="emulated", link=parse_link("5us,no-pdl"))
        torch.cuda.synchronize()
        dist.barrier(group=self.groups[0])

    def references(self) -> dict[tuple[str, int], torch.Tensor]:
        """In float32, by wiring and batch. Each rank computes a share of them and hands it to the others."""
        size, found = self.world.size, {}
        asked = [(wiring, batch) for batch in BATCHES for wiring in WIRINGS]
        mine = share(asked, self.world.rank, size)
        for wiring, batch in asked:
            found[wiring, batch] = torch.empty(1 + STEPS, batch, SMALL.vocab_size, device="cuda")
        for wiring, batch in mine:
            reference = ReferenceDecoder(self.spec, Wiring.parse(wiring, SMALL.num_layers), self.weights, tp=size)
            for at, part in enumerate(self.tokens[batch].split([PROMPT, *[1] * STEPS], dim=1)):
                found[wiring, batch][at] = reference.forward(part)[:, -1]
        for number, key in enumerate(asked):
            dist.broadcast(found[key], number % size, group=self.groups[0])
        return found


def compare(ranks: Ranks, seconds: float | None) -> dict[str, Any]:
    """Relative errors over reducers, wirings, schedules and batches, and how many seconds each part took."""
    cases, rows, marks = all_cases(SMALL.num_layers), [], [time.perf_counter()]
    deadline = Deadline(seconds, ranks.groups[0], ranks.world.device)
    ranks.compile(cases)
    marks.append(time.perf_counter())
    expected = ranks.references()
    marks.append(time.perf_counter())
    for case in cases:
        if deadline.passed():
            break
        found = ranks.logits(case, reducer=case.reducer, groups=ranks.groups)
        assert all(bool(torch.isfinite(logits).all()) for logits in found), case
        errors = [relative(a, b) for a, b in zip(found, expected[case.wiring, case.batch], strict=True)]
        rows.append({**case._asdict(), "relative_error": round(max(errors), 5)})
        if max(errors) > TOLERANCE:
            print(f"rank {ranks.world.rank}: {case}: {errors}", flush=True)
    marks.append(time.perf_counter())
    parts = dict(zip(("compile", "references", "cases"), (round(b - a, 1) for a, b in pairwise(marks)), strict=True))
    worst = max((row["relative_error"] for row in rows), default=float("nan"))
    return {"compared": len(rows), "of": len(cases), "worst_relative_error": worst, "seconds": parts, "rows": rows}


def weights_of_all_ranks(spec: EngineSpec, world: World) -> list[RankWeights]:
    return [
        stack_weights(
            spec, RankSizes.of(spec.shape, world.size, rank), random_weights(spec, world.size, rank, torch.bfloat16, "cuda")
        )
        for rank in range(world.size)
    ]


def prompts_of_many_lengths(world: World, groups: tuple) -> float:
    """Symmetric buffers of prompts are used again, in one shot and in two, and a width that ranks do not divide into whole vectors."""
    shape = replace(SMALL, hidden_size=576, num_layers=2)
    spec = EngineSpec.from_shape(shape)
    made = weights_of_all_ranks(spec, world)
    wiring = Wiring.parse("ladder", shape.num_layers)
    engine = DecodeEngine(
        spec, wiring, made[world.rank], tp=world.size, rank=world.rank, reducer="symm", groups=groups, batch=2, max_context=700
    )
    worst = 0.0
    for length in (3, 513, 40, 515, 641, 7):
        generator = torch.Generator("cuda").manual_seed(length)
        tokens = torch.randint(0, shape.vocab_size, (2, length), generator=generator, device="cuda")
        expected = ReferenceDecoder(spec, wiring, made, tp=world.size).forward(tokens)[:, -1]
        worst = max(worst, relative(engine.gather(engine.prefill(tokens)), expected))
    return worst


def reducers_by_time(world: World, groups: tuple) -> dict[str, float]:
    size = {"batch": 1, "hidden": 4096, "dtype": torch.bfloat16, "device": world.device}
    decode, _, times = choose_reducers("auto", tp=world.size, link=None, groups=groups, **size)
    assert decode.name == min(times, key=times.__getitem__)
    return times


def ranks_main() -> None:
    options = parsed()
    torch.manual_seed(0)
    with distributed("cuda") as world:
        everyone = list(range(world.size))
        groups = (dist.new_group(everyone), dist.new_group(everyone))
        result: dict[str, Any] = {
            "benchmark": "real-rank-logits",
            "ranks": world.size,
            **shared_gpu.sharing(world.ranks_per_gpu),
        }
        result["all_reduce_us"] = reducers_by_time(world, groups)
        long = prompts_of_many_lengths(world, groups)
        result["prompts_relative_error"] = round(long, 5)
        result |= compare(Ranks(world, groups), options.seconds)
        result |= environment()
        worst = result["worst_relative_error"]
        if world.is_main:
            if options.out:
                options.out.mkdir(parents=True, exist_ok=True)
                (options.out / f"real-logits-tp{world.size}.json").write_text(json.dumps(result, indent=1) + "\n")
            reduced = ", ".join(f"{name} {us:.1f} us" for name, us in result["all_reduce_us"].items())
            where = {name: result.get(name) for name in ("gpu", "torch", "triton", "date", "commit")}
            print(
                f"{world.where}: {result['compared']} of {result['of']} cases, worst relative error {worst:.4f}, prompts {long:.4f}; an "
                f"all-reduce of 8 KB: {reduced}; seconds: {result['seconds']}: {where}",
                flush=True,
            )
        if not (worst <= TOLERANCE and long <= TOLERANCE and result["compared"] == result["of"]):
            raise SystemExit(1)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("ranks", type=int, nargs="*", default=[2, 4, 8])
    parser.add_argument("--seconds", type=float, help="Of each number of ranks, from when they have met.")
    parser.add_argument("--out", type=Path, help="Write a JSON result for each number of ranks here.")
    return parser.parse_args()


def main() -> int:
    """With every number of ranks that is asked for."""
    options = parsed()
    shared_gpu.share_gpu()
    more = [f"--seconds={options.seconds}"] if options.seconds else []
    more += [f"--out={options.out}"] if options.out else []
    return max(launch([str(ranks), *more], ranks, "tests.gpu.test_ranks_gpu") for ranks in options.ranks)


if __name__ == "__main__":
    if launched() > 1:
        run_command(ranks_main)
        os._exit(0)
    sys.exit(main())
