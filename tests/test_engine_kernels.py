"""The Triton kernels on the CPU interpreter against the slow twin, at small shapes, with poisoned outputs."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when the kernels are defined: before their import
pytest.importorskip("triton")

from ladder_residual.config import Wiring
from ladder_residual.engine import carveout, multiprocessors, row_ops
from ladder_residual.engine._triton import mend_interpreter
from ladder_residual.engine.cache import KVCache
from ladder_residual.engine.execute import Executor
from ladder_residual.engine.gemm_ops import GemmOps
from ladder_residual.engine.gemv_ops import GemvOps, GemvTiles, Tile
from ladder_residual.engine.launcher import BEHIND, BEHIND_BUT_NEWEST
from ladder_residual.engine.prefill_ops import FusedPrefillOps, PrefillOps
from ladder_residual.engine.reducers import NoReducer
from ladder_residual.engine.reference import ReferenceDecoder
from ladder_residual.engine.row_ops import RowOps, RowTiles
from ladder_residual.engine.schedule import plan_steps
from ladder_residual.engine.spec import HEAD_DIMS, EngineSpec, RankSizes
from ladder_residual.engine.streams import RecordingStreams
from ladder_residual.engine.weights import random_weights, stack_weights
from ladder_residual.presets import ModelShape, presets

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the kernels are tested in tests/gpu")
mend_interpreter()


def shape(family: str = "llama", **sizes: int) -> ModelShape:
    usual = {
        "hidden_size": 48,
        "intermediate_size": 40,
        "num_layers": 2,
        "num_heads": 2,
        "num_kv_heads": 1,
        "head_dim": 64,
        "vocab_size": 24,
    }
    return ModelShape(family=family, **{**usual, **sizes})  # type: ignore[arg-type]


def tiles(slices: int, splits: int, depth: int = 1, block_k: int = 32) -> GemvTiles:
    tile = Tile(8, block_k, 1, depth)
    return GemvTiles(tile, Tile(8, 64, 1, depth), tile, tile, tile, slices=slices, splits=splits, block_t=16)


def step_against_reference(spec, wiring, batch, prompt, ops_of, schedule="one", tp=1, rank=0):
    """Prefill with the plain ops, then two decode steps with the kernels; largest relative error of the logits."""
    sizes = RankSizes.of(spec.shape, tp, rank)
    weights = stack_weights(spec, sizes, random_weights(spec, tp, rank, torch.float32, "cpu"))
    cache = KVCache(spec, sizes, batch, 64, torch.float32, "cpu")
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, spec.shape.vocab_size, (batch, prompt + 2), generator=generator)
    reference = ReferenceDecoder(spec, wiring, [weights], tp=tp, first_rank=rank)

    def executor(ops, rows, schedule):
        return Executor(
            plan_steps(wiring, schedule), ops, NoReducer(), RecordingStreams(), rows=rows, hidden=sizes.hidden, tp=tp,
            dtype=torch.float32, device=torch.device("cpu"),
        )  # fmt: skip

    if prompt:
        logits = torch.empty(batch * prompt, sizes.vocab_rows)
        executor(PrefillOps(spec, sizes, weights, cache, prompt), batch * prompt, "one").run(tokens[:, :prompt], logits)
        reference.forward(tokens[:, :prompt])
    worst = 0.0
    decode = executor(ops_of(spec, sizes, weights, cache), batch, schedule)
    for step in range(2):
        cache.positions.fill_(prompt + step)
        logits = torch.full((batch, sizes.vocab_rows), float("nan"))
        decode.run(tokens[:, prompt + step].contiguous(), logits)
        expected = reference.forward(tokens[:, prompt + step : prompt + step + 1])[:, 0]
        assert torch.isfinite(logits).all()
        worst = max(worst, float((logits - expected).norm() / expected.norm()))
    return worst


@pytest.mark.parametrize(
    ("family", "slices", "splits", "depth", "paired"),
    [("llama", 1, 1, 1, False), ("qwen2", 3, 2, 2, True), ("qwen3", 2, 3, 3, False), ("llama", 2, 3, 3, True)],
)
def test_one_token_kernels(family: str, slices: int, splits: int, depth: int, paired: bool) -> None:
    spec = EngineSpec.from_shape(shape(family))
    made = tiles(slices, splits, depth)
    made = made.in_pairs() if paired else made
    assert step_against_reference(spec, Wiring.parse("ladder", 2), 1, 19, lambda *a: GemvOps(*a, made, pdl=0)) < 2e-5


@pytest.mark.parametrize("shared", [0, 3])
@pytest.mark.parametrize(("spec", "rows"), [("ladder", 2), ("parallel", 4), ("desync-2x", 8)])
def test_programs_that_walk_over_the_rows(spec: str, rows: int, shared: int) -> None:
    # two programs: each takes several blocks of rows, the last one not full
    walk = Tile(rows, 128, 1, walkers=1, shared=shared)
    made = replace(tiles(1, 2), qkv=walk, gate_up=walk, head=walk)
    sizes = shape(hidden_size=72, intermediate_size=44, num_heads=4, num_kv_heads=2)  # no power of two
    worst = step_against_reference(EngineSpec.from_shape(sizes), Wiring.parse(spec, 2), 1, 5,
                                   lambda *a: GemvOps(*a, made, pdl=0), tp=2, rank=1)  # fmt: skip
    assert worst < 2e-5


@pytest.mark.parametrize("head_dim", [128, 256])
def test_wider_heads(head_dim: int) -> None:
    spec = EngineSpec.from_shape(shape(head_dim=head_dim))
    wiring = Wiring.parse("ladder", 2)
    assert step_against_reference(spec, wiring, 1, 17, lambda *a: GemvOps(*a, tiles(1, 2), pdl=0)) < 2e-5
    assert step_against_reference(spec, wiring, 2, 17, lambda *a: GemmOps(*a, pdl=0, splits=2)) < 2e-5


@pytest.mark.parametrize("spec", ["parallel", "desync-3x", "ladder:1"])
def test_wirings_with_one_token_kernels(spec: str) -> None:
    made = tiles(1, 2).in_pairs()
    wiring = Wiring.parse(spec, 2)
    worst = step_against_reference(EngineSpec.from_shape(shape(num_heads=4, num_kv_heads=2)), wiring, 1, 5,
                                   lambda *a: GemvOps(*a, made, pdl=0), tp=2, rank=1)  # fmt: skip
    assert worst < 2e-5


@pytest.mark.parametrize("schedule", ["two", "woven"])
def test_schedules_with_one_token_kernels_and_no_context(schedule: str) -> None:
    made = tiles(3, 4)
    spec = EngineSpec.from_shape(shape())
    worst = step_against_reference(spec, Wiring.parse("ladder", 2), 1, 0, lambda *a: GemvOps(*a, made, pdl=0), schedule)
    assert worst < 2e-5


@pytest.mark.parametrize(("wiring", "batch"), [("parallel", 1), ("ladder:1", 1), ("parallel", 2), ("ladder", 2)])
def test_woven_layers_of_other_wirings_and_batches(wiring: str, batch: int) -> None:
    spec = EngineSpec.from_shape(shape(num_heads=4, num_kv_heads=2))
    ops = (lambda *a: GemvOps(*a, tiles(1, 2), pdl=0)) if batch == 1 else (lambda *a: GemmOps(*a, pdl=0, splits=2))
    assert step_against_reference(spec, Wiring.parse(wiring, 2), batch, 4, ops, "woven", tp=2, rank=1) < 2e-5


def test_sizes_that_do_not_fill_a_tile() -> None:
    spec = EngineSpec.from_shape(shape(hidden_size=72, intermediate_size=44, num_heads=3, num_kv_heads=1))
    for made in (tiles(1, 2, 2, 64), tiles(1, 2, 2, 64).in_pairs()):
        worst = step_against_reference(spec, Wiring.parse("standard", 2), 1, 9, lambda *a, made=made: GemvOps(*a, made, pdl=0))
        assert worst < 2e-5


def test_a_width_that_makes_no_pairs_is_read_weight_by_weight() -> None:
    spec = EngineSpec.from_shape(shape(intermediate_size=45))
    assert (
        step_against_reference(spec, Wiring.parse("ladder", 2), 1, 3, lambda *a: GemvOps(*a, tiles(1, 2).in_pairs(), pdl=0))
        < 2e-5
    )


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("batch", [2])
def test_kernels_for_several_sequences(family: str, batch: int) -> None:
    spec = EngineSpec.from_shape(shape(family))
    wiring = Wiring.parse("ladder", 2)
    assert step_against_reference(spec, wiring, batch, 18, lambda *a: GemmOps(*a, pdl=0, splits=2)) < 2e-5


@pytest.mark.parametrize("wiring", ["parallel", "desync-3x"])
def test_wirings_with_several_sequences(wiring: str) -> None:
    spec = EngineSpec.from_shape(shape(num_heads=4, num_kv_heads=2))
    worst = step_against_reference(spec, Wiring.parse(wiring, 2), 2, 4, lambda *a: GemmOps(*a, pdl=0, splits=1), tp=2, rank=1)
    assert worst < 2e-5


ROWS = RowTiles(16, 1)


@pytest.mark.parametrize(("family", "batch", "schedule"), [("llama", 2, "two"), ("qwen2", 3, "woven"), ("qwen3", 16, "two")])
def test_products_of_our_own_for_several_sequences(family: str, batch: int, schedule: str) -> None:
    spec = EngineSpec.from_shape(shape(family))
    wiring = Wiring.parse("ladder", 2)
    assert step_against_reference(spec, wiring, batch, 3, lambda *a: RowOps(*a, ROWS, pdl=0, splits=2), schedule) < 2e-5


@pytest.mark.parametrize("wiring", ["parallel", "desync-3x"])
def test_what_a_message_carries_rides_on_our_own_products(wiring: str) -> None:
    spec = EngineSpec.from_shape(shape(num_heads=4, num_kv_heads=2))
    worst = step_against_reference(
        spec, Wiring.parse(wiring, 2), 3, 2, lambda *a: RowOps(*a, ROWS, pdl=0, splits=1), tp=2, rank=1
    )
    assert worst < 2e-5


def test_our_own_products_where_sizes_do_not_fill_a_tile() -> None:
    spec = EngineSpec.from_shape(shape(hidden_size=72, intermediate_size=44, num_heads=3, num_kv_heads=1))
    made = RowTiles(64, 3)
    assert step_against_reference(spec, Wiring.parse("standard", 2), 5, 2, lambda *a: RowOps(*a, made, pdl=0, splits=1)) < 2e-5


@pytest.mark.parametrize(("family", "rows", "slices"), [("qwen2", 16, 2), ("qwen3", 32, 4), ("llama", 64, 1)])
def test_every_tile_of_our_own_products(family: str, rows: int, slices: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes of several tiles each, so that the loop over them runs: of gate and up, of a slice, of the others."""
    monkeypatch.setattr(row_ops, "FILLED", 1)  # a model this small would get the smallest tile
    spec = EngineSpec.from_shape(shape(family, hidden_size=600, intermediate_size=300))
    assert RowTiles(rows, slices).tile(600, gated=False).rows == rows
    made = RowTiles(rows, slices)
    assert step_against_reference(spec, Wiring.parse("ladder", 2), 5, 2, lambda *a: RowOps(*a, made, pdl=0, splits=2)) < 2e-5


def test_slices_that_would_drop_columns_are_refused() -> None:
    with pytest.raises(ValueError, match="5 slices do not divide a hidden size of 48"):
        step_against_reference(
            EngineSpec.from_shape(shape()), Wiring.parse("ladder", 2), 2, 1, lambda *a: RowOps(*a, RowTiles(16, 5), pdl=0)
        )


@pytest.mark.parametrize(
    ("family", "wiring", "tp"), [("llama", "ladder", 1), ("qwen2", "desync-3x", 2), ("qwen3", "parallel", 1)]
)
def test_a_prompts_fused_kernels_equal_plain_pytorch(family: str, wiring: str, tp: int) -> None:
    """Logits of every position, and what is left in the cache."""
    spec = EngineSpec.from_shape(shape(family, num_heads=6, num_kv_heads=2, hidden_size=72))
    batch, steps, wired = 3, 5, Wiring.parse(wiring, 2)
    sizes = RankSizes.of(spec.shape, tp, tp - 1)
    weights = stack_weights(spec, sizes, random_weights(spec, tp, tp - 1, torch.float32, "cpu"))
    tokens = torch.randint(0, spec.shape.vocab_size, (batch, steps), generator=torch.Generator().manual_seed(5))
    found = []
    for ops in (PrefillOps, FusedPrefillOps):
        cache = KVCache(spec, sizes, batch, 16, torch.float32, "cpu")
        executor = Executor(
            plan_steps(wired), ops(spec, sizes, weights, cache, steps), NoReducer(), RecordingStreams(), rows=batch * steps,
            hidden=sizes.hidden, tp=tp, dtype=torch.float32, device=torch.device("cpu"),
        )  # fmt: skip
        logits = torch.full((batch * steps, sizes.vocab_rows), float("nan"))
        executor.run(tokens, logits)
        found.append((logits, cache.keys[..., :steps, :], cache.values[..., :steps, :]))
    for plain, fused in zip(*found, strict=True):
        assert torch.isfinite(plain).all()
        assert plain.abs().sum() > 0
        torch.testing.assert_close(fused, plain, rtol=2e-5, atol=2e-6)


def test_default_tiles_fit_every_preset() -> None:
    for name, preset in presets().items():
        if not preset.gated_mlp or preset.head_dim not in HEAD_DIMS:
            continue
        for tp in (1, 2, 4, 8):
            if (
                preset.num_heads % tp
                or preset.intermediate_size % tp
                or (preset.num_kv_heads % tp and tp % preset.num_kv_heads)
            ):
                continue
            sizes = RankSizes.of(preset, tp, 0)
            sets = GemvTiles.candidates(sizes, 2048)
            # without walkers: both sets of a rank and both of a whole model
            assert len(set(sets)) == len(sets) >= 4, name
            for made in sets:
                assert sizes.hidden % made.slices == 0, name
                for tile in (made.qkv, made.output, made.gate_up, made.down, made.head):
                    walks = (
                        sizes.hidden <= tile.block_k == 512 * tile.warps <= 2 * sizes.hidden
                    )  # all of x, 16 columns a thread
                    assert walks if tile.walkers else tile.block_k == 256 * tile.warps, (name, tile)
            rows = RowTiles.candidates(sizes)
            assert all(sizes.hidden % made.slices == 0 for made in rows), name
            products = (sizes.hidden, sizes.vocab_rows, sizes.qkv_width)
            used = [tuple(made.tile(count, gated=False) for count in products) for made in rows]
            assert len(set(used)) == len(used) > 0, name  # none is timed twice


def test_tiles_in_shared_memory_are_offered_where_they_fit() -> None:
    sizes = RankSizes.of(presets()["llama-3-70b"], 8, 0)

    def offered(**limits: int) -> int:
        return sum(made.gate_up.shared > 0 for made in GemvTiles.candidates(sizes, 2048, **limits))

    assert offered() == 1
    assert offered(shared=100 << 10) == offered(itemsize=4) == 0


def test_a_carveout_is_set_once_and_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, int]] = []
    answers = [1, 0, 0]  # the driver refuses the first time

    class Driver:
        def cuFuncSetAttribute(self, function: ctypes.c_void_p, attribute: int, value: int) -> int:
            assert attribute == 9
            calls.append((function.value, value))
            return answers[len(calls) - 1]

    monkeypatch.setattr(carveout, "driver", Driver)
    monkeypatch.setattr(carveout, "_set", {})
    kernel = SimpleNamespace(function=77)
    for percent in (None, 100, 100, 100, None, None):
        carveout.set_carveout(kernel, percent)
    carveout.set_carveout(None, 100)  # the interpreter compiles nothing
    assert calls == [(77, 100), (77, 100), (77, -1)]


@pytest.mark.parametrize(("card", "early"), [((8, 9), False), ((9, 0), True), ((10, 0), True)])
def test_which_cards_launch_early(card: tuple[int, int], early: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The assembler of older ones knows neither the wait for the kernel before nor requests in bulk."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: card)
    assert multiprocessors.hopper(torch.device("cuda")) == early
    assert not multiprocessors.hopper(torch.device("cpu"))


@pytest.mark.slow
def test_every_kernel_of_a_step_compiles_for_hopper(tmp_path) -> None:
    """Without a GPU: the assembler comes with Triton. What would not start on one (too much shared memory) shows here."""
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("kernels_for_hopper.py")],
        capture_output=True,
        text=True,
        env={name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        | {"TRITON_CACHE_DIR": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    compiled = [json.loads(line) for line in done.stdout.splitlines()]
    assert {made["kernel"] for made in compiled} >= {
        "norm_project",
        "norm_walk",
        "norm_walk_shared",
        "output_project",
        "project_rows",
        "decode_attention",
        "rotate_and_store",
    }
    for made in compiled:
        assert made["shared"] <= 227 << 10, made
        assert made["early"] == (made["constants"].get("PDL", 0) > 0), made
        assert made["tensor_cores"] == (made["kernel"] in ("project_rows", "decode_attention")), made
        if made["kernel"] == "project_rows" and made["constants"]["K"] > 2 * made["constants"]["BLOCK_K"]:
            assert made["copies_ahead"], made
        if made["kernel"] == "norm_walk_shared":  # its first tiles are asked for before the previous kernel has ended
            assert made["copies_before_the_wait"] == made["constants"]["TILES"], made
        assert (made["past_l1"] > 0) == (made["constants"].get("PDL", 0) >= BEHIND), made
        if made["kernel"] == "norm_walk" and made["constants"]["PDL"] == BEHIND_BUT_NEWEST:
            # both blocks are under way before the products of the first: ``_nothing`` holds them there
            blocks = 2 if made["constants"]["SECOND"] else 1
            loads = made["constants"]["ROWS"] * made["constants"]["WIDTH"] // (8 * 32 * made["warps"])  # eight weights each
            assert made["loads_before_products"] >= blocks * loads, made
        waits_for_a_sum = made["constants"].get("LATER", 0) > 0 and made["constants"]["PDL"] == BEHIND_BUT_NEWEST
        assert made["into_l2"] == waits_for_a_sum, made
    walks = {(made["constants"]["PDL"], made["constants"]["SECOND"]) for made in compiled if made["kernel"] == "norm_walk"}
    assert any(made["into_l2"] for made in compiled)
    early = {(how, second) for how in (BEHIND, BEHIND_BUT_NEWEST) for second in (False, True)}
    assert walks == {(1, False), (2, False), *early}
