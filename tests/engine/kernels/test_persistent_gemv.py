"""Persistent GEMV kernels on the interpreter: what they read before they wait, what they compute, when they trigger the next kernel."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from ladder_residual.engine.cuda.launcher import Launcher
from ladder_residual.engine.cuda.pdl import PdlMode
from ladder_residual.engine.ops.gemv import GemvOps
from ladder_residual.engine.ops.tiles import Tile, block_counts, packed
from ladder_residual.engine.reducers import NoReducer
from tests.engine.tiny import TOLERANCE, decode_error, tiny_shape, tiny_tiles

pytestmark = pytest.mark.usefixtures("interpreter")
HIDDEN = 64


def replace_pdl_instructions(monkeypatch: pytest.MonkeyPatch, wait, trigger) -> None:
    from ladder_residual.engine.kernels import common, persistent_gemv

    for kernels in (common, persistent_gemv):
        monkeypatch.setattr(kernels, "tl_cuda", SimpleNamespace(gdc_wait=wait, gdc_launch_dependents=trigger))


def launch(stream, outputs, new, norm, weights, out, *, programs, counts, rows, gated=False, **constants) -> None:
    from ladder_residual.engine.kernels.persistent_gemv import persistent_norm_gemv

    channels, pairs = out.shape[0], packed(weights)
    persistent_norm_gemv[(programs,)](
        stream, *outputs, *[norm] * (3 - len(outputs)), new, norm, pairs, out, pairs, 1e-5, channels, *counts,
        K=HIDDEN, WIDTH=HIDDEN, STORE_WIDTH=32, ROWS=rows, KEEP_STREAM=True, NUM_ADDS=len(outputs), GATED=gated, THREADS=32,
        L2_PREFETCH=0, **constants,
    )  # fmt: skip


@pytest.mark.parametrize("is_noop", [True, False])
@pytest.mark.parametrize("prefetch_second", [True, False])
def test_steps_that_read_before_they_wait(prefetch_second: bool, is_noop: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same numbers whether the newest output comes last or all at once. Here nothing starts early; tests/gpu has the real thing."""
    replace_pdl_instructions(monkeypatch, lambda: None, lambda: None)
    monkeypatch.setattr(NoReducer, "is_noop", is_noop)
    monkeypatch.setattr(NoReducer, "reduce", lambda *_: None)
    persistent = Tile(16, 64, 1, programs_per_sm=1, trigger_after=0.5)
    tiles = replace(tiny_tiles(1, 2), qkv=persistent, gate_up=replace(persistent, prefetch_second=prefetch_second))
    modes: list[PdlMode] = []
    take_mode = Launcher.take_mode
    monkeypatch.setattr(Launcher, "take_mode", lambda self, can: modes.append(take_mode(self, can)) or modes[-1])
    ops = partial(GemvOps, tiles=tiles, reads_before_wait=True)
    assert decode_error(tiny_shape(num_layers=3), "ladder", ops, schedule="interleaved") < TOLERANCE
    newest = set() if is_noop else {PdlMode.WAIT_BEFORE_NEWEST}
    assert set(modes) == {PdlMode.TRIGGER_THEN_WAIT, PdlMode.WAIT_THEN_TRIGGER, PdlMode.WAIT_AFTER_COMPUTE, *newest}


@pytest.mark.parametrize("num_adds", [1, 2, 3])
@pytest.mark.parametrize(("prefetch_second", "trigger_at"), [(False, 1), (True, 1), (True, 0)])
@pytest.mark.parametrize("stores", [True, False])
@pytest.mark.parametrize(
    ("pdl", "before"),
    [
        (PdlMode.TRIGGER_THEN_WAIT, "trigger wait"), (PdlMode.WAIT_THEN_TRIGGER, "wait"), (PdlMode.WAIT_AFTER_COMPUTE, ""),
        (PdlMode.WAIT_BEFORE_NEWEST, "wait"),
    ],
)  # fmt: skip
def test_what_is_read_before_the_wait(
    pdl: PdlMode, before: str, stores: bool, prefetch_second: bool, trigger_at: int, num_adds: int, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """Outputs that may be incomplete are there only once the kernel has waited, and it triggers the next one only after that."""
    rows, programs = 12, 2  # three blocks of two rows a program
    generator = torch.Generator().manual_seed(4)
    stream, norm = torch.randn(HIDDEN, generator=generator), torch.rand(HIDDEN, generator=generator)
    outputs, weights = torch.randn(num_adds, HIDDEN, generator=generator), torch.randn(rows, HIDDEN, generator=generator)
    incomplete = {PdlMode.WAIT_AFTER_COMPUTE: 0, PdlMode.WAIT_BEFORE_NEWEST: 1}.get(pdl, num_adds)
    given = outputs.clone()
    given[num_adds - incomplete :] = float("nan")
    log: list[str] = []

    def wait() -> None:
        log.append("wait")
        given.copy_(outputs)

    replace_pdl_instructions(monkeypatch, wait, lambda: log.append("trigger"))
    out, new = torch.full((rows,), float("nan")), torch.full((HIDDEN,), float("nan"))
    launch(
        stream, [*given], new, norm, weights, out, programs=programs, counts=(3, 3, programs), rows=2, STORE_STREAM=stores,
        PREFETCH_SECOND=prefetch_second, TRIGGER_AT=trigger_at, PDL=int(pdl),
    )  # fmt: skip
    x = stream + outputs.sum(0)
    torch.testing.assert_close(new, x if stores else torch.full_like(x, float("nan")), equal_nan=True)
    torch.testing.assert_close(out, weights @ (x * torch.rsqrt(x.square().mean() + 1e-5) * norm), rtol=1e-4, atol=1e-4)
    # after block TRIGGER_AT, and at the end for programs with too few blocks
    triggers = [] if pdl == PdlMode.TRIGGER_THEN_WAIT else ["wait", "trigger"] * 2
    assert log == [*before.split(), *triggers] * programs


@pytest.mark.parametrize("tail_share", [1, 0.5])
@pytest.mark.parametrize("prefetch_second", [False, True])
@pytest.mark.parametrize(("rows", "programs"), [(2, 2), (4, 2), (6, 2), (10, 2), (14, 4), (62, 4), (94, 3)])
@pytest.mark.parametrize("gated", [False, True])
def test_blocks_that_only_some_programs_have(
    rows: int, programs: int, gated: bool, prefetch_second: bool, tail_share: float
) -> None:  # fmt: skip
    """Programs with no block, with one, with two and with many, the last not full; the first ones take what is left over."""
    channels = rows // 2 if gated else rows
    generator = torch.Generator().manual_seed(8)
    x, norm, output = (torch.randn(HIDDEN, generator=generator) for _ in range(3))
    weights = torch.randn(rows, HIDDEN, generator=generator)
    out, new = torch.full((channels,), float("nan")), torch.full((HIDDEN,), float("nan"))
    counts = block_counts(-(-channels // (2 if gated else 4)), programs, tail_share)
    launch(
        x, [output], new, norm, weights, out, programs=programs, counts=counts, rows=4, gated=gated, STORE_STREAM=True,
        PREFETCH_SECOND=prefetch_second, TRIGGER_AT=0, PDL=int(PdlMode.OFF),
    )  # fmt: skip
    total = x + output
    y = weights @ (total * torch.rsqrt(total.square().mean() + 1e-5) * norm)
    wanted = torch.nn.functional.silu(y[:channels]) * y[channels:] if gated else y
    torch.testing.assert_close(new, total)
    torch.testing.assert_close(out, wanted, rtol=1e-4, atol=1e-4)
