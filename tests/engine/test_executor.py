"""Plans run on the CPU: every wiring and every schedule computes what the reference computes, and waits where it must."""

from __future__ import annotations

import pytest
import torch

from ladder_residual.core.config import Wiring
from ladder_residual.engine.cache import KVCache
from ladder_residual.engine.cuda.launcher import Launcher
from ladder_residual.engine.cuda.pdl import PdlMode
from ladder_residual.engine.cuda.streams import RecordingStreams
from ladder_residual.engine.ops.prefill import PrefillOps
from ladder_residual.engine.reducers import NcclReducer, NoReducer
from ladder_residual.engine.schedule import available_schedules
from tests.engine.reference import ReferenceDecoder
from tests.engine.tiny import CPU, LAYERS, SHAPE, make_executor, random_tokens, tiny_rank
from tests.ranks import run_on_ranks

WIRINGS = [
    "standard", "ladder", "ladder:3-5", "ladder:0-2", "ladder:1,3,4", "parallel", "parallel:2-3", "desync-2x", "desync-4x",
    "desync-5x", "desync-3x:0-2", "no-comm", "delayed-1", "delayed-3", "delayed-2:1-3",
]  # fmt: skip
CASES = [(spec, schedule) for spec in WIRINGS for schedule in available_schedules(Wiring.parse(spec, LAYERS))]
ONE_TOKEN = torch.zeros(1, 1, dtype=torch.long)


class Announced(NoReducer):
    """Reduces nothing, but says it is no no-op, so that the executor starts and waits for all-reduces."""

    is_noop, pdl = False, True

    def allocate(self, rows, hidden, dtype, device, *, keep_partial=False):
        return super().allocate(rows, hidden, dtype, device, keep_partial=True)

    def reduce(self, partial, reduced, channel, launch):
        reduced.copy_(partial)
        launch.dependent = True  # what waits for it may start before its end


def run(spec: str, schedule: str, tokens: torch.Tensor = ONE_TOKEN, reducer=None, ops=PrefillOps, tp: int = 2, rank: int = 0):
    """Logits, the reference's, and the log of the streams."""
    engine_spec, sizes, weights = tiny_rank(SHAPE, tp, rank)
    wiring, (batch, length) = Wiring.parse(spec, LAYERS), tokens.shape
    cache = KVCache(engine_spec, sizes, batch, 16, torch.float32, CPU)
    streams = RecordingStreams()
    made = ops(engine_spec, sizes, weights, cache, length)
    logits = torch.full((batch * length, sizes.vocab_rows), float("nan"))
    make_executor(wiring, schedule, made, sizes, batch * length, reducer, streams).run(tokens, logits)
    reference = ReferenceDecoder(engine_spec, wiring, [weights], tp=tp, first_rank=rank).forward(tokens)
    return logits.view(batch, length, -1), reference, streams.log


@pytest.mark.parametrize(("spec", "schedule"), CASES)
@pytest.mark.parametrize("announced", [False, True])
def test_every_schedule_computes_the_recurrence(spec: str, schedule: str, announced: bool) -> None:
    if not announced and spec.startswith("delayed"):
        pytest.skip("without other ranks' partials the engine plans delayed as standard")
    tokens = random_tokens(SHAPE, 3, 5)
    logits, reference, _ = run(spec, schedule, tokens, reducer=Announced() if announced else None, rank=1)
    torch.testing.assert_close(logits, reference, rtol=1e-4, atol=1e-5)


def logits_of_two_ranks(world, cases):
    """This rank's logits of each case, over a real all-reduce, and its columns of the reference that holds both ranks' shards."""
    found = []
    for spec, schedule in cases:
        tokens = random_tokens(SHAPE, 3, 5)
        logits, _, _ = run(spec, schedule, tokens, reducer=NcclReducer((world.group, world.group)), rank=world.rank)
        ranks = [tiny_rank(SHAPE, 2, rank)[2] for rank in range(2)]
        engine_spec, sizes, _ = tiny_rank(SHAPE, 2, world.rank)
        whole = ReferenceDecoder(engine_spec, Wiring.parse(spec, LAYERS), ranks, tp=2).forward(tokens)
        own = whole.split(sizes.vocab_rows, dim=-1)[world.rank]
        found.append(float((logits - own).norm() / own.norm()))
    return found


def test_two_ranks_compute_the_recurrence_of_both():
    for errors in run_on_ranks(2, logits_of_two_ranks, CASES):
        assert dict(zip(CASES, errors, strict=True)) == dict.fromkeys(CASES, pytest.approx(0, abs=1e-5))


def test_all_reduces_of_a_serial_ladder_are_hidden() -> None:
    """Between the start of an all-reduce and the wait for it, another module computes on the main stream."""
    *_, log = run("ladder", "serial", reducer=Announced())
    for layer in range(LAYERS - 1):
        for kind, hider in (("attention", f"mlp {layer}"), ("mlp", f"attention {layer + 1}")):
            started = log.index((f"reduce-{kind}", "compute", f"all-reduce of {kind} {layer}"))
            waited = log.index(("main", "wait", f"all-reduce of {kind} {layer}"))
            assert ("main", "compute", hider) in log[started:waited]


def test_attention_and_all_reduces_of_an_interleaved_ladder_are_hidden() -> None:
    """QKV, gate/up and down stay in one chain. Attention, its output projection and its all-reduce run beside the MLP, the MLP's all-reduce
    beside the next QKV."""
    *_, log = run("ladder", "interleaved", reducer=Announced())

    def between(first: tuple[str, str, str], last: tuple[str, str, str]) -> list[tuple[str, str, str]]:
        return log[log.index(first) : log.index(last)]

    for layer in range(LAYERS):
        attention, mlp = f"attention {layer}", f"mlp {layer}"
        attend = ("attention", "compute", f"attend of {attention}")
        reduced = ("reduce-attention", "compute", f"all-reduce of {attention}")
        assert ("attention", "wait", f"qkv of {attention}") in between(("main", "compute", attention), attend)
        assert ("reduce-attention", "wait", attention) in between(attend, reduced)
        assert ("attention", "record", attention) in between(attend, reduced)  # after the output projection, beside the chain
        assert ("main", "compute", mlp) in between(reduced, ("main", "wait", f"all-reduce of {attention}"))
    for layer in range(LAYERS - 1):
        hider, reduced = ("main", "compute", f"attention {layer + 1}"), f"all-reduce of mlp {layer}"
        assert hider in between(("reduce-mlp", "compute", reduced), ("main", "wait", reduced))
    waits = [entry for entry in log if entry[1] == "wait"]
    assert len(waits) == len(set(waits))  # none waits twice for the same


def test_all_reduces_of_standard_are_in_line() -> None:
    *_, log = run("standard", "serial", reducer=Announced())
    assert not [entry for entry in log if entry[1] == "wait"]
    assert sum(entry[2].startswith("all-reduce of") for entry in log) == 2 * LAYERS


class Launches(Launcher):
    """Notes the mode of each kernel instead of launching it."""

    def __call__(self, kernel, grid, *args, num_warps, max_registers=None, can_read_before_wait=False, **constants):
        self.noted = [*getattr(self, "noted", ()), self.take_mode(can_read_before_wait)]
        self.dependent = True


@pytest.mark.parametrize("announced", [False, True])
def test_which_kernels_read_before_they_wait(announced: bool) -> None:
    class Ops(PrefillOps):
        """Computes as usual, and launches the chain's kernels in name: QKV, gate/up, down."""

        reads_before_wait = True
        launchers = (Launches(), Launches())

        def qkv(self, step, stream, added):
            super().qkv(step, stream, added)
            self.launchers[0](None, (), num_warps=1, can_read_before_wait=True)

        def gate_up(self, step, stream, added):
            super().gate_up(step, stream, added)
            self.launchers[0](None, (), num_warps=1, can_read_before_wait=True)

        def down(self, step, stream, partial, attention_partial):
            super().down(step, stream, partial, attention_partial)
            self.launchers[0](None, (), num_warps=1)

    run("ladder", "interleaved", reducer=Announced() if announced else None, ops=Ops)
    first, qkv = PdlMode.WAIT_THEN_TRIGGER, PdlMode.WAIT_AFTER_COMPUTE
    # without all-reduces nothing older than the previous kernel is incomplete
    gate_up = PdlMode.WAIT_BEFORE_NEWEST if announced else PdlMode.WAIT_AFTER_COMPUTE
    # the first QKV reads the embedding, and down what gate/up writes
    assert Ops.launchers[0].noted == [first, gate_up, first, *[qkv, gate_up, first] * (LAYERS - 1)]


@pytest.mark.parametrize(("schedule", "early"), [("serial", True), ("two_stream", False), ("interleaved", True)])
def test_the_first_kernel_may_start_before_the_embeddings_all_reduce_ends(schedule: str, early: bool) -> None:
    """On the same stream; with two chains an event comes between."""
    noted = []

    class Ops(PrefillOps):
        launchers = (Launcher(), Launcher())

        def qkv(self, step, stream, added):
            super().qkv(step, stream, added)
            noted.append(self.launchers[step.chain].dependent)

    run("ladder", schedule, reducer=Announced(), ops=Ops)
    assert noted[0] == early


class Noting(Announced):
    """Whether each all-reduce could have started before its input was complete."""

    def __init__(self) -> None:
        self.early: list[bool] = []

    def reduce(self, partial, reduced, channel, launch):
        self.early.append(launch.dependent)
        super().reduce(partial, reduced, channel, launch)


@pytest.mark.parametrize(("ops", "reducer"), [(False, True), (True, False), (True, True)])
def test_all_reduces_beside_the_chain_start_early_only_where_ops_and_reducer_say_so(
    monkeypatch: pytest.MonkeyPatch, ops: bool, reducer: bool
) -> None:
    monkeypatch.setattr(PrefillOps, "pdl_all_reduce", ops)
    monkeypatch.setattr(Noting, "pdl", reducer)
    noting = Noting()
    run("ladder", "serial", reducer=noting)
    beside = noting.early[1:-1]  # the embedding's, and the last one, which the head waits for, are in line
    assert beside == [ops and reducer] * (2 * LAYERS - 1)


@pytest.mark.parametrize("reads_before_wait", [True, False])
def test_beside_an_interleaved_chain_only_the_mlps_all_reduces_start_early(
    reads_before_wait: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And only if kernels read before they wait: then QKV makes way for them."""
    monkeypatch.setattr(PrefillOps, "pdl_all_reduce", True)
    monkeypatch.setattr(PrefillOps, "reads_before_wait", reads_before_wait)
    noting = Noting()
    run("ladder", "interleaved", reducer=noting)
    assert noting.early[1:-1] == ([False, reads_before_wait] * LAYERS)[:-1]


@pytest.mark.parametrize("pdl", [PdlMode.OFF, PdlMode.TRIGGER_THEN_WAIT, PdlMode.WAIT_THEN_TRIGGER])
def test_without_pdl_no_all_reduce_starts_early(pdl: PdlMode) -> None:
    asked: set[PdlMode] = set()

    class Asked(Announced):
        def reduce(self, partial, reduced, channel, launch):
            asked.add(launch.pdl)
            super().reduce(partial, reduced, channel, launch)

    class Ops(PrefillOps):
        launchers = (Launcher(pdl), Launcher(pdl))

    run("ladder", "serial", reducer=Asked(), ops=Ops)
    beside = PdlMode.TRIGGER_THEN_WAIT if pdl else PdlMode.OFF
    assert asked == {pdl, beside}  # those in line are launched as its kernels are
