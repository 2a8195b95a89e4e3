"""Every way to all-reduce gives the same result, in bfloat16 within the stated bound."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from ladder_residual import rewire
from tests.ranks import run_on_ranks
from tests.tiny_models import padded_inputs, random_ids, relative, shard_model, tiny_model


def logits_agree(world):
    inputs = padded_inputs()
    logits = {}
    for kind, options in {
        "blocking": {"kind": "blocking"},
        "sockets": {"kind": "async"},
        "gloo": {"kind": "async", "small_allreduce_bytes": 0},
        "latency": {"kind": "async", "latency": 1e-4},
        "two groups": {"kind": "async", "small_allreduce_bytes": 0},
    }.items():
        model = rewire(tiny_model("llama"), "ladder")
        ranks = replace(world, second=dist.new_group()) if kind == "two groups" else world
        shard_model(model, ranks, reducer=ranks.reducer(**options))
        with torch.no_grad():
            logits[kind] = model(**inputs).logits
    return {kind: relative(value, logits["blocking"]) for kind, value in logits.items()}


def results_agree(world):
    """All-reduces alone: odd sizes, one element, none, a big one, several under way."""
    errors = {}
    gloo = {"small_allreduce_bytes": 0}
    with_second = replace(world, second=dist.new_group())  # as on GPUs
    for name, (ranks, options) in {"sockets": (world, {}), "gloo": (world, gloo), "two groups": (with_second, gloo)}.items():
        reducer = ranks.reducer("async", **options)
        for shape in [(1,), (0,), (5, 7), (3, 1, 129), (400_000,)]:
            parts = [torch.randn(shape, generator=torch.Generator().manual_seed(rank)) for rank in range(world.size)]
            pendings = [reducer.start(parts[world.rank] * k) for k in (1, 2, 3)]
            for k, pending in zip((3, 2, 1), reversed(pendings), strict=True):  # waited for in another order
                expected = sum(parts) * k
                errors[name, shape, k] = (pending.wait() - expected).abs().max().item() if expected.numel() else 0.0
        dtypes = [torch.bfloat16, torch.float16, torch.float64]
        for dtype in dtypes:
            total = reducer.start(torch.full((3,), float(world.rank + 1), dtype=dtype)).wait()
            errors[name, str(dtype)] = (total - 6).abs().max().item()
    return errors


@pytest.mark.parametrize("size", [2, 3])
def test_every_reducer_gives_the_same_result(size):
    for errors in run_on_ranks(size, logits_agree if size == 2 else results_agree):
        assert max(errors.values()) < 1e-5, errors


def rounded_results(world):
    """For both ways: the largest error as a share of the stated bound, and the results themselves."""
    found = {}
    for way, below in (("sockets", 1 << 30), ("gloo", 0)):
        reducer = world.reducer(small_allreduce_bytes=below, comm_dtype="bf16")
        shares, results = [], []
        for shape in [(1,), (3, 129), (2, 5, 64), (0,), (70_000,)]:
            parts = [torch.randn(shape, generator=torch.Generator().manual_seed(rank)) for rank in range(world.size)]
            total = reducer.start(parts[world.rank]).wait()
            assert total.dtype == torch.float32
            exact, size = sum(part.double() for part in parts), sum(part.abs().double() for part in parts)
            # Rounding each partial, and where bfloat16 itself is added up, once more per rank.
            steps = 1 if way == "sockets" else 1 + world.size
            bound = steps * 2.0**-8 * size * 1.01
            if total.numel():
                shares.append(((total.double() - exact).abs() / bound).max().item())
            results.append(total)
        found[way] = (max(shares), [value.tolist() for value in results[:3]])
    return found


@pytest.mark.parametrize("size", [2, 3])
def test_bfloat16_communication_errs_within_the_stated_bound_and_alike_on_all_ranks(size):
    results = run_on_ranks(size, rounded_results)
    for way in ("sockets", "gloo"):
        shares = [result[way][0] for result in results]
        assert all(0.1 < share <= 1 for share in shares), shares  # rounded, and no more than that
        assert all(result[way][1] == results[0][way][1] for result in results)


def rounded_model(world):
    inputs = {"input_ids": random_ids(3, 9)}
    found = {}
    for comm_dtype in ("same", "bf16"):
        model = rewire(tiny_model("llama"), "ladder")
        shard_model(model, world, reducer=world.reducer(comm_dtype=comm_dtype))
        output = model(**inputs, labels=inputs["input_ids"])
        output.loss.backward()
        found[comm_dtype] = output.logits.detach(), model.base_model.layers[0].self_attn.q_proj.weight.grad
    errors = [((rough - exact).norm() / exact.norm()).item() for rough, exact in zip(found["bf16"], found["same"], strict=True)]
    narrow = world.reducer(comm_dtype="bf16").start(torch.full((3,), 1.0 + world.rank, dtype=torch.float16)).wait()
    return errors, narrow.dtype == torch.float16 and narrow.tolist() == [3.0] * 3


def test_a_model_that_communicates_in_bfloat16_answers_and_learns_nearly_the_same():
    for errors, narrow_stays in run_on_ranks(2, rounded_model):
        assert all(1e-7 < error < 2e-2 for error in errors), errors
        assert narrow_stays  # 16 bits are not made 16 bits again
