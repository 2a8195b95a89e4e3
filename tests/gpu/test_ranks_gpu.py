"""The engine and training on several real ranks of this machine's GPUs; on one GPU they share it.

``PYTHONPATH=src:. python tests/gpu/test_ranks_gpu.py`` runs it from a clone without pytest; with the argument ``2`` on two ranks only.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
from dataclasses import replace

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
from ladder_residual.engine.schedule import available_schedules
from ladder_residual.engine.weights import RankWeights
from tests.engine.reference import ReferenceDecoder
from tests.gpu.test_engine_gpu import SHAPE, TOLERANCE, relative

try:
    import pytest

    pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
    each_count = pytest.mark.parametrize("ranks", [2, 4, 8])
except ImportError:  # a bare machine: main() below starts the ranks

    def each_count(function):  # type: ignore[no-redef, misc]
        return function


WIRINGS = [
    "standard", "ladder", "ladder:2-3", "parallel", "desync-2x", "desync-3x", "delayed-1", "delayed-2", "delayed-1:1-2", "no-comm",
]  # fmt: skip
BATCHES = (1, 3, 16)
SMALL = replace(SHAPE, num_kv_heads=4)


@each_count
def test_real_ranks(ranks: int) -> None:
    """In processes of their own: CUDA does not work in a fork."""
    shared_gpu.share_gpu()
    assert launch([str(ranks)], ranks, "tests.gpu.test_ranks_gpu") == 0


def logits_of_every_wiring(world: World, groups: tuple) -> tuple[float, int]:
    """The worst relative error over reducers, wirings, schedules and batches: a prompt and two steps after it, against the float32
    reference that holds every rank's shard."""
    spec = EngineSpec.from_shape(SMALL)
    made = weights_of_all_ranks(spec, world)
    sizes = RankSizes.of(SMALL, world.size, world.rank)
    generator = torch.Generator("cuda").manual_seed(0)
    cases = [
        (text, batch, torch.randint(0, SMALL.vocab_size, (batch, 72), generator=generator, device="cuda"))
        for text, batch in itertools.product(WIRINGS, BATCHES)
    ]
    references = reference_logits(spec, made, cases, world, groups[0])
    worst, count = 0.0, 0
    for (spec_text, batch, tokens), expected in zip(cases, references, strict=True):
        wiring = Wiring.parse(spec_text, SMALL.num_layers)
        for reducer, schedule in itertools.product(("symm", "nccl"), available_schedules(wiring)):
            tiles = GemvTiles.candidates(sizes, 80)[0] if batch == 1 and schedule != "interleaved" else None
            engine = DecodeEngine(
                spec, wiring, made[world.rank], tp=world.size, rank=world.rank, reducer=reducer, groups=groups, batch=batch,
                max_context=80, schedule=schedule, gemm_backend="cublas", tiles=tiles,
            )  # fmt: skip
            assert engine.reducer.name == reducer, f"{reducer} was asked for, {engine.reducer.name} is used"
            found = [engine.gather(engine.prefill(tokens[:, :70])).clone()]
            found += [engine.gather(engine.decode(tokens[:, column])).clone() for column in (70, 71)]
            errors = [relative(a, b) for a, b in zip(found, expected, strict=True)]
            count += 1
            if max(errors) > TOLERANCE:
                print(f"rank {world.rank}: {spec_text} {schedule} {reducer} batch {batch}: {errors}", flush=True)
            assert all(bool(torch.isfinite(logits).all()) for logits in found)
            worst = max(worst, *errors)
    return worst, count


def weights_of_all_ranks(spec: EngineSpec, world: World) -> list[RankWeights]:
    return [
        stack_weights(
            spec, RankSizes.of(spec.shape, world.size, rank), random_weights(spec, world.size, rank, torch.bfloat16, "cuda")
        )
        for rank in range(world.size)
    ]


def reference_logits(
    spec: EngineSpec, made: list[RankWeights], cases: list, world: World, group: dist.ProcessGroup
) -> list[torch.Tensor]:
    """(3, batch, vocabulary) of each case; each rank computes a share of them and hands it to the others."""
    found = []
    for number, (spec_text, batch, tokens) in enumerate(cases):
        logits = torch.empty(3, batch, spec.shape.vocab_size, device="cuda")
        if number % world.size == world.rank:
            reference = ReferenceDecoder(spec, Wiring.parse(spec_text, spec.shape.num_layers), made, tp=world.size)
            for at, part in enumerate((tokens[:, :70], tokens[:, 70:71], tokens[:, 71:])):
                logits[at] = reference.forward(part)[:, -1]
        found.append(logits)
    for number, logits in enumerate(found):
        dist.broadcast(logits, number % world.size, group=group)
    return found


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
    torch.manual_seed(0)
    with distributed("cuda") as world:
        everyone = list(range(world.size))
        groups = (dist.new_group(everyone), dist.new_group(everyone))
        began = time.perf_counter()
        times = reducers_by_time(world, groups)
        long = prompts_of_many_lengths(world, groups)
        worst, count = logits_of_every_wiring(world, groups)
        failed = worst > TOLERANCE or long > TOLERANCE
        if world.is_main:
            where = {
                name: value for name, value in environment().items() if name in ("gpu", "torch", "triton", "date", "commit")
            }
            reduced = ", ".join(f"{name} {us:.1f} us" for name, us in times.items())
            print(
                f"{world.where}: {count} cases, worst relative error {worst:.4f}, prompts {long:.4f}; an all-reduce of 8 KB: {reduced}; "
                f"{time.perf_counter() - began:.0f} s: {where}",
                flush=True,
            )
        if failed:
            raise SystemExit(1)


def main() -> int:
    """With every number of ranks that is asked for."""
    shared_gpu.share_gpu()
    counts = [int(text) for text in sys.argv[1:]] or [2, 4, 8]
    return max(launch([str(ranks)], ranks, "tests.gpu.test_ranks_gpu") for ranks in counts)


if __name__ == "__main__":
    if launched() > 1:
        run_command(ranks_main)
        os._exit(0)
    sys.exit(main())
