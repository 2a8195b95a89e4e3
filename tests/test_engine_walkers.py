"""Kernels that walk over the rows, and weights in pairs, on Triton's interpreter: what is read before a wait, and what is computed."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from ladder_residual.config import Wiring
from ladder_residual.engine import kernels_attention, kernels_project, kernels_walk
from ladder_residual.engine.gemv_ops import GemvOps, GemvTiles, Tile, paired, shares, walking
from ladder_residual.engine.launcher import BEHIND, BEHIND_BUT_NEWEST, Launcher
from ladder_residual.engine.reducers import NoReducer
from ladder_residual.engine.spec import EngineSpec, RankSizes
from test_engine_kernels import shape, step_against_reference, tiles

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the kernels are tested in tests/gpu")


@pytest.mark.parametrize("silent", [True, False])
@pytest.mark.parametrize("second", [True, False])
def test_walkers_that_read_before_they_wait(second: bool, silent: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same numbers whether the newest output comes last or all at once. Here nothing runs early; tests/gpu has the real thing."""
    ignored = SimpleNamespace(gdc_wait=lambda: None, gdc_launch_dependents=lambda: None)
    for kernels in (kernels_project, kernels_walk, kernels_attention):
        monkeypatch.setattr(kernels, "tl_cuda", ignored)
    monkeypatch.setattr(NoReducer, "silent", silent)
    monkeypatch.setattr(NoReducer, "reduce", lambda *_: None)
    walk = Tile(2, 64, 1, walkers=1, turn=0.5)
    made = replace(tiles(1, 2), qkv=walk, gate_up=replace(walk, second=second))
    noted: list[int] = []
    how = Launcher.waits
    monkeypatch.setattr(Launcher, "waits", lambda self, before: noted.append(how(self, before)) or noted[-1])
    spec, wiring = EngineSpec.from_shape(shape(num_layers=3)), Wiring.parse("ladder", 3)
    worst = step_against_reference(
        spec, wiring, 1, 4, lambda *a: GemvOps(*a, made, pdl=1, reads_before=True), "woven"
    )  # fmt: skip
    assert worst < 2e-5
    assert set(noted) == ({1, 2, BEHIND} if silent else {1, 2, BEHIND, BEHIND_BUT_NEWEST})


@pytest.mark.parametrize("deltas", [1, 2, 3])
@pytest.mark.parametrize(("second", "turn"), [(False, 1), (True, 1), (True, 0)])
@pytest.mark.parametrize("stores", [True, False])
@pytest.mark.parametrize(("pdl", "before"), [(1, "start wait"), (2, "wait"), (BEHIND, ""), (BEHIND_BUT_NEWEST, "wait")])
def test_what_a_walker_reads_before_it_waits(
    pdl: int, before: str, stores: bool, second: bool, turn: int, deltas: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What may still be on its way is there only once the kernel has waited, and the next one is let in only after that."""
    hidden, rows, programs = 64, 12, 2  # three blocks of two rows a program
    generator = torch.Generator().manual_seed(4)
    stream, norm = torch.randn(hidden, generator=generator), torch.rand(hidden, generator=generator)
    outputs, weights = torch.randn(deltas, hidden, generator=generator), torch.randn(rows, hidden, generator=generator)
    late = {1: deltas, 2: deltas, BEHIND: 0, BEHIND_BUT_NEWEST: 1}[pdl]
    given = outputs.clone()
    given[deltas - late :] = float("nan")
    log: list[str] = []

    def wait() -> None:
        log.append("wait")
        given.copy_(outputs)

    events = SimpleNamespace(gdc_wait=wait, gdc_launch_dependents=lambda: log.append("start"))
    for kernels in (kernels_project, kernels_walk):
        monkeypatch.setattr(kernels, "tl_cuda", events)
    out, new = torch.full((rows,), float("nan")), torch.full((hidden,), float("nan"))
    deltas_given = [*given, *[norm] * (3 - deltas)]
    kernels_walk.norm_walk[(programs,)](
        stream, *deltas_given, new, norm, paired(weights), out, paired(weights), 1e-5, rows,
        FEW=3, MANY=3, EARLY=programs, K=hidden, WIDTH=hidden, PIECE=32, ROWS=2, KEEP=True, DELTAS=deltas, STORES=stores, GATED=False,
        SECOND=second, THREADS=32, LATER=0, TURN=turn, PDL=pdl,
    )  # fmt: skip
    x = stream + outputs.sum(0)
    torch.testing.assert_close(new, x if stores else torch.full_like(x, float("nan")), equal_nan=True)
    torch.testing.assert_close(out, weights @ (x * torch.rsqrt(x.square().mean() + 1e-5) * norm), rtol=1e-4, atol=1e-4)
    let_in = ["wait", "start"] * 2 if pdl > 1 else []  # at its turn, and at the end for walks that are too short
    assert log == [*before.split(), *let_in] * programs


@pytest.mark.parametrize("lead", [1, 0.5])
@pytest.mark.parametrize("second", [False, True])
@pytest.mark.parametrize(("rows", "programs"), [(2, 2), (4, 2), (6, 2), (10, 2), (14, 4), (62, 4), (94, 3)])
@pytest.mark.parametrize("gated", [False, True])
def test_blocks_that_only_some_programs_have(rows: int, programs: int, gated: bool, second: bool, lead: float) -> None:
    """Programs with no block, with one, with two and with many, the last not full; with a lead the first take what is left over."""
    hidden, channels = 64, rows // 2 if gated else rows
    generator = torch.Generator().manual_seed(8)
    x, norm, output = (torch.randn(hidden, generator=generator) for _ in range(3))
    weights = torch.randn(rows, hidden, generator=generator)
    out, new = torch.full((channels,), float("nan")), torch.full((hidden,), float("nan"))
    kernels_walk.norm_walk[(programs,)](
        x, output, norm, norm, new, norm, paired(weights), out, paired(weights), 1e-5, channels,
        **dict(zip(("FEW", "MANY", "EARLY"), shares(-(-channels // (2 if gated else 4)), programs, lead), strict=True)),
        K=hidden, WIDTH=hidden, PIECE=32, ROWS=4, KEEP=True, DELTAS=1, STORES=True, GATED=gated,
        SECOND=second, THREADS=32, LATER=0, TURN=0, PDL=0,
    )  # fmt: skip
    total = x + output
    y = weights @ (total * torch.rsqrt(total.square().mean() + 1e-5) * norm)
    wanted = torch.nn.functional.silu(y[:channels]) * y[channels:] if gated else y
    torch.testing.assert_close(new, total)
    torch.testing.assert_close(out, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_pairs_of_weights_of_every_type(dtype: torch.dtype) -> None:
    """Each kernel against torch, in float32: rows and columns that do not fill a tile, rows of small and of large weights."""
    rows, columns = 22, 72
    generator = torch.Generator().manual_seed(6)
    weights = (torch.randn(rows, columns, generator=generator) * torch.logspace(-3, 3, rows)[:, None]).to(dtype)
    norm, x = torch.rand(columns, generator=generator).to(dtype), torch.randn(columns, generator=generator)
    assert paired(weights).shape == (rows, columns // 2)
    normed = x * torch.rsqrt(x.square().mean() + 1e-5) * norm.float()

    def check(found: torch.Tensor, vector: torch.Tensor) -> None:
        size = (weights.float().abs() @ vector.abs()).clamp(min=1e-30)
        assert ((found - weights.float() @ vector).abs() / size).max() < 1e-6

    def out() -> torch.Tensor:
        return torch.full((rows,), float("nan"), dtype=torch.float32)

    before = (x, norm, norm, norm, torch.empty(columns), norm)  # nothing to absorb
    constants = {"K": columns, "KEEP": True, "DELTAS": 0, "STORES": False, "GATED": False, "PDL": 0}
    walk = {"FEW": 3, "MANY": 3, "EARLY": 2, "THREADS": 32, "LATER": 0, "TURN": 0}
    walks = [(kernels_walk.norm_walk, [paired(weights)], {**walk, "SECOND": second}) for second in (False, True)]
    for kernel, later, more in (*walks, (kernels_walk.norm_walk_shared, [], {"TILES": 2})):
        found = out()
        kernel[(2,)](*before, paired(weights), found, *later, 1e-5, rows, WIDTH=128, PIECE=64, ROWS=4, **constants, **more)
        check(found, normed)
    inner = x.to(dtype)
    for word, given in ((1, weights), (2, paired(weights))):
        found, few = out(), {"ROWS": 8, "BLOCK_K": 32, "WORD": word}
        kernels_project.norm_project[(3, 1)](
            *before, given, found, found, 1e-5, rows, **few, DEPTH=2, SLICES=1, **constants
        )  # fmt: skip
        check(found, normed)
        found = out()
        kernels_project.output_project[(3,)](
            inner, given, x, norm, found, 1.0, rows, K=columns, **few, DEPTH=1, ADD_STREAM=False, ADD_OTHER=False, PDL=0
        )  # fmt: skip
        check(found, inner.float())


@pytest.mark.parametrize("lead", [1, 0.5, 0.3])
@pytest.mark.parametrize("blocks", [1, 3, 131, 132, 133, 264, 320, 1792, 4008])
def test_every_block_has_one_walker(blocks: int, lead: float) -> None:
    """The walks as norm_walk makes them: programs in turn, and behind the common rounds the first ones in turn."""
    programs = walking(blocks, 132)
    few, many, early = shares(blocks, programs, lead)
    assert 1 <= few <= many
    assert 1 <= early <= programs
    assert many - few <= (2 if lead >= 0.5 else 4)
    walked = []
    for own in range(programs):
        block = own
        for at in range(many if own < early else few):
            walked.append(block)
            block += programs if at < few else early
    assert sorted(block for block in walked if block < blocks) == list(range(blocks))


def test_no_more_is_asked_for_than_there_is() -> None:
    pairs = torch.empty(100, 10, dtype=torch.int32)
    assert Tile(4, 64, 1, later=64).asked_by(2, pairs) == 16
    assert Tile(4, 64, 1, later=4000).asked_by(8, pairs) == 124  # of 125, in whole 16 bytes
    assert Tile(4, 64, 1).asked_by(8, pairs) == 0


@pytest.mark.slow
@pytest.mark.parametrize("index", range(9))
def test_every_set_of_tiles_of_a_rank(index: int) -> None:
    """As an engine of 16-bit weights would try them, QKV in slices and the rest; here in float32, one program after another."""
    wide = shape(hidden_size=2048, intermediate_size=64, num_layers=2)
    sets = GemvTiles.candidates(RankSizes.of(wide, 1, 0), 64, itemsize=2)
    assert len(sets) == 9
    made, spec = sets[index], EngineSpec.from_shape(wide)
    schedule = "woven" if "woven" in made.schedules else "two"
    worst = step_against_reference(spec, Wiring.parse("ladder", 2), 1, 2, lambda *a: GemvOps(*a, made, pdl=0), schedule)
    assert worst < 2e-5
