"""The range of vLLM releases, and the fields of vLLM that the plugin relies on; no engine is started here."""

from __future__ import annotations

import dataclasses
import logging
from types import SimpleNamespace
from typing import Any

import guide
import pytest
import vllm
from packaging.requirements import Requirement
from transformers import AutoConfig

from ladder_residual.vllm_plugin import versions
from ladder_residual.vllm_plugin.routing import route


@pytest.mark.parametrize("version", ["0.25.1", "0.34.0", "1.0.0rc1"])
def test_a_release_outside_the_range_is_refused_with_what_to_install(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(vllm, "__version__", version)
    rewired = AutoConfig.for_model("llama", num_hidden_layers=4, wiring="ladder")
    with pytest.raises(ValueError, match=f'{version} is installed: pip install "vllm>=0.26,<0.34"'):
        route(rewired)
    route(AutoConfig.for_model("llama"))  # a plain model is vLLM's own business


@pytest.mark.parametrize("version", ["0.26.0", "0.32.0+cpu", "0.33.1.dev7+g0123abc", "0.1.dev1+g0123abc", "dev"])
def test_releases_of_the_range_and_builds_that_do_not_say(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(vllm, "__version__", version)
    versions.check_version()


def test_the_range_is_one() -> None:
    """What the message says to install, the page's table and the check."""
    wanted = Requirement(versions.INSTALL.split('"')[1]).specifier
    oldest, newest = (".".join(map(str, version)) for version in (versions.OLDEST, versions.NEWEST))
    after = f"{versions.NEWEST[0]}.{versions.NEWEST[1] + 1}"
    assert [f"{oldest}.0" in wanted, f"{newest}.9" in wanted, f"{after}.0" in wanted] == [True, True, False]
    rows = [line.split("|")[1].strip() for line in guide.section("vLLM releases").splitlines() if line.startswith("| 0.")]
    assert rows[0].startswith(oldest)
    assert rows[-1].endswith(newest)


class Config:
    """An object of vLLM's: takes any attribute."""


@pytest.mark.parametrize(
    ("use", "missing"),
    [
        (lambda: versions.leave_experts_unreduced(SimpleNamespace(moe_config=Config())), "Config.skip_final_all_reduce"),
        (lambda: versions.leave_unreduced(Config()), "Config.reduce_results"),
        (lambda: versions.runs_two_batches(Config()), "Config.use_ubatching"),
    ],
)
def test_a_field_this_vllm_does_not_have_is_an_error(use: Any, missing: str) -> None:
    with pytest.raises(ValueError, match=f"vLLM {vllm.__version__} has no {missing}".replace("+", r"\+")):
        use()


def with_passes(**fields: Any) -> Any:
    return SimpleNamespace(compilation_config=SimpleNamespace(pass_config=SimpleNamespace(**fields)))


def test_sequence_parallelism_is_looked_for_where_vllm_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    both = {"enable_sp": False, "fuse_gemm_comms": True}
    monkeypatch.setattr(vllm, "__version__", "0.26.0")
    assert versions.sequence_parallel_passes(with_passes(**both)) == ["fuse_gemm_comms"]
    with pytest.raises(ValueError, match=r"has no SimpleNamespace\.enable_sp"):
        versions.sequence_parallel_passes(with_passes())
    monkeypatch.setattr(vllm, "__version__", "0.33.0")
    assert versions.sequence_parallel_passes(with_passes()) == []
    assert versions.sequence_parallel_passes(with_passes(**both)) == ["fuse_gemm_comms"]


def test_the_installed_vllm_has_what_is_used() -> None:
    from vllm.config import ModelConfig, ParallelConfig, VllmConfig
    from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig

    assert versions.runs_two_batches(ParallelConfig()) is False
    assert versions.runs_two_batches(ParallelConfig(enable_dbo=True)) is True
    assert versions.sequence_parallel_passes(VllmConfig()) == []
    assert "skip_final_all_reduce" in {field.name for field in dataclasses.fields(FusedMoEConfig)}
    # What is read on a GPU alone. The model's fields are those of a config that needs a checkpoint.
    versions.checked(VllmConfig(), "compilation_config", "max_cudagraph_capture_size")
    versions.checked(VllmConfig(), "compilation_config", "cudagraph_mode")
    versions.checked(VllmConfig(), "compilation_config", "pass_config", "fuse_allreduce_rms")
    versions.checked(VllmConfig(), "scheduler_config", "max_num_batched_tokens")
    fields = {field.name for field in dataclasses.fields(ModelConfig)}
    assert {"hf_text_config", "dtype", "quantization", "enforce_eager", "enable_sleep_mode"} <= fields


def test_a_function_vllm_does_not_have_is_said_and_rewired_models_are_refused(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(versions, "_not_wrapped", set())
    rewired = AutoConfig.for_model("llama", num_hidden_layers=4, wiring="ladder")
    route(rewired)
    owner = SimpleNamespace(__name__="vllm.config.model")
    logger = logging.getLogger("vllm.ladder_residual")
    logger.addHandler(caplog.handler)
    try:
        versions.wrap(owner, "get_hf_text_config", lambda function: function)
    finally:
        logger.removeHandler(caplog.handler)
    assert "has no vllm.config.model.get_hf_text_config" in caplog.text
    assert versions.INSTALL in caplog.text
    with pytest.raises(ValueError, match=r"has no vllm\.config\.model\.get_hf_text_config, which the ladder plugin needs"):
        route(rewired)
    route(AutoConfig.for_model("llama"))
