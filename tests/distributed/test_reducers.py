"""How sums travel: rounded on the wire, exchanged or all-reduced, chosen by what the link was measured to be."""

import pytest
import torch

from ladder_residual.link_probe import SumTimes, chosen_reducer, exchange_below, probe_link
from ladder_residual.loading import shard_model
from ladder_residual.model import rewire
from ladder_residual.parallel import World
from ranks import run_on_ranks
from tiny_models import random_ids, tiny_model


def rounded_sums(world):
    """For both ways: the largest error as a share of the stated bound, and a fingerprint of the sums."""
    found = {}
    for way, below in (("exchange", 1 << 30), ("all-reduce", 0)):
        reducer = world.reducer(exchange_below=below, wire="bf16")
        shares, sums = [], []
        for shape in [(1,), (3, 129), (2, 5, 64), (0,), (70_000,)]:
            parts = [torch.randn(shape, generator=torch.Generator().manual_seed(rank)) for rank in range(world.size)]
            total = reducer.start(parts[world.rank]).wait()
            assert total.dtype == torch.float32
            exact, size = sum(part.double() for part in parts), sum(part.abs().double() for part in parts)
            # Rounding each partial, and where bfloat16 itself is added up, once more per rank.
            steps = 1 if way == "exchange" else 1 + world.size
            bound = steps * 2.0**-8 * size * 1.01
            if total.numel():
                shares.append(((total.double() - exact).abs() / bound).max().item())
            sums.append(total)
        found[way] = (max(shares), [value.tolist() for value in sums[:3]])
    return found


@pytest.mark.parametrize("size", [2, 3])
def test_bfloat16_on_the_wire_errs_within_the_stated_bound_and_alike_on_all_ranks(size):
    results = run_on_ranks(size, rounded_sums)
    for way in ("exchange", "all-reduce"):
        shares = [result[way][0] for result in results]
        assert all(0.1 < share <= 1 for share in shares), shares  # rounded, and no more than that
        assert all(result[way][1] == results[0][way][1] for result in results)


def rounded_model(world):
    inputs = {"input_ids": random_ids(3, 9)}
    found = {}
    for wire in ("same", "bf16"):
        model = rewire(tiny_model("llama"), "ladder")
        shard_model(model, world, reducer=world.reducer(wire=wire))
        output = model(**inputs, labels=inputs["input_ids"])
        output.loss.backward()
        found[wire] = output.logits.detach(), model.base_model.layers[0].self_attn.q_proj.weight.grad
    errors = [((rough - exact).norm() / exact.norm()).item() for rough, exact in zip(found["bf16"], found["same"], strict=True)]
    narrow = world.reducer(wire="bf16").start(torch.full((3,), 1.0 + world.rank, dtype=torch.float16)).wait()
    return errors, narrow.dtype == torch.float16 and narrow.tolist() == [3.0] * 3


def test_a_model_over_a_rounding_wire_answers_and_learns_nearly_the_same():
    for errors, narrow_stays in run_on_ranks(2, rounded_model):
        assert all(1e-7 < error < 2e-2 for error in errors), errors
        assert narrow_stays  # 16 bits are not made 16 bits again


def probed(world):
    probe = probe_link(world, sizes=(1 << 10, 1 << 16, 1 << 18), repeats=2)
    chosen = chosen_reducer(world, exchange="measured", wire="bf16")
    with pytest.raises(ValueError, match="choose fixed or measured"):
        chosen_reducer(world, exchange="guessed")
    with pytest.raises(ValueError, match="choose same or bf16"):
        world.reducer(wire="int4")
    with pytest.raises(ValueError, match="need the async reducer"):
        world.reducer("blocking", wire="bf16")
    return probe.to_dict(), chosen.exchange_below, chosen.wire == torch.bfloat16


@pytest.mark.parametrize("size", [2, 3])
def test_all_ranks_measure_and_choose_alike(size):
    results = run_on_ranks(size, probed)
    assert all(result == results[0] for result in results)
    probe, chosen, is_rounded = results[0]
    assert is_rounded
    assert [row["bytes"] for row in probe["rows"]] == [1 << 10, 1 << 16, 1 << 18]
    assert all(row[way] > 0 for row in probe["rows"] for way in ("exchange", "exchange_bf16", "all_reduce"))
    assert 0 <= chosen <= 1 << 22


def test_the_link_decides_what_is_exchanged():
    def rows(*times):
        return [SumTimes(bytes=10**k, exchange=a, exchange_bf16=a, all_reduce=b) for k, (a, b) in enumerate(times, 3)]

    assert exchange_below(rows((1, 2), (3, 4), (9, 5))) == 10**4  # one trip wins until the bytes weigh more
    assert exchange_below(rows((1, 2), (3, 4))) == 10**4
    assert exchange_below(rows((3, 2), (1, 4))) == 0  # a noisy win above a loss is not believed


def test_one_process_has_no_link():
    with pytest.raises(ValueError, match="between two or more CPU ranks"):
        probe_link(World())
    assert chosen_reducer(World(), exchange="measured", wire="bf16").size == 1
