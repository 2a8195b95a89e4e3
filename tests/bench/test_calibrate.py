"""`ladder bench calibrate`: what it writes is what the planner reads, and a gap it fits explains the step it was fitted on."""

import json
import tomllib
from dataclasses import replace

import pytest

from ladder_residual.bench.calibrate import calibrate, fitted_gap, planned_ms, read_toml
from ladder_residual.bench.calibrate_measure import Sizes, memory_bytes, step_shape
from ladder_residual.bench.checks import check_name
from ladder_residual.distributed.world import World
from ladder_residual.models.presets import ModelShape
from ladder_residual.plan.api import plan
from ladder_residual.plan.calibration import device_toml, link_toml
from ladder_residual.plan.cost import Phase, RankCost, RankShape, engine
from ladder_residual.plan.planner import engine_on
from tests.ranks import run_on_ranks

TINY = replace(step_shape(1), hidden_size=64, intermediate_size=128, num_heads=4, num_kv_heads=4, head_dim=16, vocab_size=128)
SMALL = Sizes(matrix=256, matrices=4, rows=64)
RATES = {"memory_gb": 8, "read_gbs": 10.0, "tflops": 0.1, "source": "here"}


def calibrate_two(world):
    return calibrate(world, name="my-box", shape=TINY, sizes=SMALL)


def test_two_ranks_measure_a_device_and_a_link_the_planner_can_use():
    result, other = run_on_ranks(2, calibrate_two)
    assert other["toml"] == result["toml"]  # the slowest rank counts, on every rank
    hardware = read_toml(result["toml"])
    device = hardware.device("my-box")
    assert device.bandwidth_gbs == pytest.approx(result["device"]["read_gbs"], rel=1e-3)
    assert (device.engine, device.bandwidth_share) == ("cpu", 1.0)
    assert engine_on(device).module_us == pytest.approx(result["device"]["module_us"], rel=1e-3)
    link = hardware.link("my-box", device)
    assert link.ranks == 2
    assert len(result["link_samples_us"]) == 6
    assert link.us(1 << 20, 2) > link.us(1 << 10, 2)
    assert [row["wiring"] for row in result["checks"]] == ["no-comm", "standard", "ladder"]
    [row] = plan(TINY, device="my-box", link=["my-box"], tp=[2], prompt=16, new=4, hardware=hardware)
    assert row.speedup["ladder"] >= 1
    assert json.loads(json.dumps(result))["dtype"] == "float32"


def test_one_process_measures_no_link():
    result = calibrate(World(), shape=TINY, sizes=SMALL, dtype="bfloat16")
    assert set(tomllib.loads(result["toml"])) == {"devices"}
    assert [row["wiring"] for row in result["checks"]] == ["no-comm"]
    assert result["device"]["memory_gb"] == pytest.approx(memory_bytes(World()) / 1e9)
    wide = calibrate(World(), shape=TINY, sizes=SMALL, dtype="float32")
    assert wide["device"]["memory_gb"] == pytest.approx(result["device"]["memory_gb"] / 2)  # 4 bytes count as 2


@pytest.mark.parametrize(("batch", "gap"), [(1, 300.0), (4, 700.0)])
def test_a_fitted_gap_explains_its_step_and_predicts_others(batch, gap):
    field = "module_us" if batch == 1 else "module_us_batched"
    truth = read_toml(device_toml("x", **RATES, engine="cpu", **{field: gap}))
    bare = read_toml(device_toml("x", **RATES, engine="cpu", module_us=1, module_us_batched=1))
    shape = step_shape()
    measured = planned_ms(truth, "x", shape, 2, batch, "no-comm")
    assert fitted_gap(bare, "x", shape, 2, batch, measured) == pytest.approx(gap)
    assert fitted_gap(bare, "x", shape, 2, batch, 0.001) == 0.1  # faster than memory allows: the error stays visible


def test_communication_is_added_to_a_standard_step():
    text = device_toml("x", **RATES, engine="cpu", module_us=500, module_us_batched=500)
    link = link_toml("x", [(1e4, 2000.0), (1e6, 2001.0)], 2, "here")
    hardware = read_toml(text + link)
    without, standard, ladder = (planned_ms(hardware, "x", step_shape(), 2, 8, w) for w in ("no-comm", "standard", "ladder"))
    assert standard == pytest.approx(without + 10 * 2.0, rel=0.01)  # 8 modules, embedding and logits
    assert ladder == pytest.approx(without + 3 * 2.0, rel=0.01)  # the last module and the edges have nothing to hide behind


def test_a_cpu_core_reads_and_then_multiplies():
    device = read_toml(device_toml("x", **RATES, batched_read_share=0.5)).device("x")
    shape = RankShape(ModelShape.from_name("ladder-1b"), 1)
    one, two = (RankCost(shape, device, engine("cpu")).mlp(Phase(rows, 1, 16)) for rows in (1, 2))
    assert one.memory_us == pytest.approx(2 * shape.mlp_parameters / 10e3, rel=0.01)
    assert one.flop_us == pytest.approx(2 * shape.mlp_parameters / 0.1e6)
    assert two.flop_us == pytest.approx(2 * one.flop_us)
    assert two.memory_us == pytest.approx(2 * one.memory_us, rel=0.01)  # products of several rows read at half the rate


def test_the_gaps_of_a_device_belong_to_its_engine():
    device = read_toml(device_toml("x", **RATES, engine="cpu", module_us=5, module_us_batched=7)).device("x")
    assert (engine_on(device).module_us, engine_on(device).module_us_batched) == (5, 7)
    assert engine_on(device, "paper") == engine("paper")


@pytest.mark.parametrize("name", ["", "My Box", "a.b", "x" * 42, '"'])
def test_names_that_toml_or_a_shell_would_stumble_over_are_refused(name):
    with pytest.raises(ValueError, match="--name is"):
        check_name(name)


def test_an_unknown_dtype_is_refused():
    with pytest.raises(ValueError, match="unknown dtype 'int3'"):
        calibrate(World(), dtype="int3")
