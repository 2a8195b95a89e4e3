"""Links, sizes, and the page made from results: everything of the engine's benchmarks that needs no GPU."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from ladder_residual.bench.gpu_report import main, render, spread
from ladder_residual.engine.emulate import measured_links, parse_link
from ladder_residual.engine.spec import EngineSpec, RankSizes
from ladder_residual.presets import ModelShape, presets

ROOT = Path(__file__).parent.parent


def test_fixed_and_linear_links() -> None:
    assert parse_link("24us").microseconds(16384) == 24
    assert parse_link("none").silent
    assert parse_link("alpha=10, beta=100").microseconds(1_000_000) == pytest.approx(10 + 10)
    assert not parse_link("alpha=0,beta=100").silent


def test_measured_links_interpolate_between_their_points() -> None:
    link = parse_link("h200_sxm-nccl", tp=8)
    points = dict(measured_links()["h200_sxm-nccl", 8])
    assert link.microseconds(16384) == points[16384]
    low, high = sorted((points[16384], points[32768]))
    assert low <= link.microseconds(24576) <= high
    assert link.microseconds(4 * max(points)) == pytest.approx(4 * points[max(points)])
    assert parse_link("h200-nccl") == link


@pytest.mark.parametrize(
    ("text", "message"), [("fast", "unknown link 'fast'"), ("24 ms", "unknown link"), ("alpha=1,beta=0", "must be above 0")]
)
def test_unknown_links(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_link(text)


def test_a_link_measured_on_other_numbers_of_gpus() -> None:
    with pytest.raises(ValueError, match=r"not measured on 3 GPUs, only on \[2, 4, 8\]"):
        parse_link("h200_sxm-nccl", tp=3)


def test_bytes_of_the_70b_shard() -> None:
    """17.4 GB a step, as counted by hand: 80 layers of QKV 1280x8192, output, gate/up 7168x8192, down, and 16032 rows of head."""
    sizes = RankSizes.of(ModelShape.from_name("llama-3-70b"), 8, 0)
    layer = 1280 * 8192 + 8192 * 1024 + 7168 * 8192 + 8192 * 3584 + 2 * 8192
    assert sizes.weight_bytes(2, tied=False) == 2 * (80 * layer + 16032 * 8192 + 8192)
    assert sizes.cache_bytes(2, 1, 1280) == 2 * 2 * 80 * 1280 * 128


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"head_dim": 80}, "head size 80 is not one of"),
        ({"family": "bloom"}, "not 'bloom'"),
        ({"num_heads": 7}, "7 heads do not divide into 8 KV heads"),
    ],
)
def test_models_the_engine_cannot_take(change: dict, message: str) -> None:
    shape = ModelShape(**{**ModelShape.from_name("llama-3.1-8b").to_dict(), **change})
    with pytest.raises(ValueError, match=message):
        EngineSpec.from_shape(shape)


def test_ranks_that_do_not_divide() -> None:
    with pytest.raises(ValueError, match="num_heads=32 does not divide into tp=3"):
        RankSizes.of(ModelShape.from_name("llama-3.1-8b"), 3, 0)
    assert RankSizes.of(ModelShape.from_name("llama-3.1-405b"), 16, 3).kv_heads == 1  # replicated


def test_rope_types() -> None:
    config = {"model_type": "llama", "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1, "num_attention_heads": 4,
              "vocab_size": 9, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}  # fmt: skip
    with pytest.raises(ValueError, match="rope type 'yarn'"):
        EngineSpec.from_hf(config)
    with pytest.raises(ValueError, match="sliding_window=4096"):
        EngineSpec.from_hf({**config, "rope_scaling": None, "sliding_window": 4096})


def test_the_page_is_what_the_results_say() -> None:
    """docs/benchmarks.md is generated: a new result without a new page fails here."""
    files = sorted((ROOT / "results" / "engine").glob("*.json"))
    results = [json.loads(file.read_text()) for file in files]
    assert render(results) == (ROOT / "docs" / "benchmarks.md").read_text()
    for result in results:
        assert result["commit"]
        assert result["gpu"]
        assert ("(emulated)" in render([result])) == (result["tp"] > 1)


def test_a_missed_target_is_shown() -> None:
    row = {"batch": 1, "link": "5us", "wiring": "ladder", "over_standard": 1.1}
    page = render([{"benchmark": "decode", "emulated": True, "model": "llama-3-70b", "tp": 8, "rows": [row]}])
    assert "| ladder over standard at 5us | >= 1.25 | 1.100 | missed |" in page


def test_spread() -> None:
    assert spread([5.0, 1.0, 2.0, 3.0, 4.0]) == {"p10_ms": 1.0, "p90_ms": 5.0, "runs": 5}


def test_report_refuses_an_empty_folder(tmp_path: Path) -> None:
    assert main([str(tmp_path), str(tmp_path / "out.md")]) == 2
    assert main([]) == 2


def test_models_named_in_runs_exist() -> None:
    location = importlib.util.spec_from_file_location("engine_sizes", ROOT / "runs" / "engine_sizes.py")
    assert location is not None
    assert location.loader is not None
    module = importlib.util.module_from_spec(location)
    location.loader.exec_module(module)
    for name, tp in module.MODELS:
        RankSizes.of(presets()[name], tp, tp - 1)
        EngineSpec.from_shape(presets()[name])
