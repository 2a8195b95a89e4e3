"""What is refused as a model is built; no engine is started here."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from ladder_residual.vllm_plugin.checks import checked_wiring


def served_as(wiring: str, family: str = "llama", **parallel: Any) -> Any:
    """As much of vLLM's configuration as the check reads."""
    sizes = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1, "data_parallel_size": 1, "enable_expert_parallel": False}
    sizes |= {"decode_context_parallel_size": 1, "prefill_context_parallel_size": 1}
    config = AutoConfig.for_model(family, num_hidden_layers=4, wiring=wiring)
    return SimpleNamespace(
        model_config=SimpleNamespace(hf_config=config, dtype=torch.bfloat16),
        parallel_config=SimpleNamespace(**(sizes | {"use_ubatching": False} | parallel)),
        compilation_config=SimpleNamespace(pass_config=SimpleNamespace(enable_sp=False, fuse_gemm_comms=False)),
        speculative_config=None,
        lora_config=None,
    )


class Watched(SimpleNamespace):
    """Notes which of its fields are read."""

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("_"):
            vars(self).setdefault("_read", set()).add(name)
        return super().__getattribute__(name)


def watched(part: SimpleNamespace) -> Watched:
    return Watched(
        **{name: watched(field) if isinstance(field, SimpleNamespace) else field for name, field in vars(part).items()}
    )


def parts_of(config: Watched) -> Iterator[Watched]:
    """vLLM's configuration and its parts."""
    yield config
    for field in vars(config).values():
        if isinstance(field, Watched):
            yield from parts_of(field)


@pytest.mark.parametrize("family", ["llama", "gemma2", "mixtral"])
def test_every_field_that_is_read_is_refused_by_name_where_vllm_lacks_it(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm.__version__", "0.31.0")  # the passes are of older releases

    def asked() -> Watched:
        config = served_as("ladder", family, tensor_parallel_size=2)
        config.lora_config = SimpleNamespace(fully_sharded_loras=False)
        config.speculative_config = SimpleNamespace(method="ngram")
        return watched(config)

    whole = asked()
    checked_wiring(whole, family)
    read = [(number, field) for number, part in enumerate(parts_of(whole)) for field in sorted(vars(part).get("_read", ()))]
    assert len(read) > 12
    for number, field in read:
        config = asked()
        delattr(list(parts_of(config))[number], field)
        with pytest.raises(
            ValueError, match=rf"vLLM 0\.31\.0 has no Watched\.{field}, which the ladder plugin needs: pip install"
        ):
            checked_wiring(config, family)


def test_diverging_streams_are_not_sent_between_stages() -> None:
    two_by_two = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}
    assert checked_wiring(served_as("ladder", **two_by_two), "llama").spec == "ladder"
    for wiring in ("desync-2x@2", "delayed-1"):
        with pytest.raises(ValueError, match="--pipeline-parallel-size 1"):
            checked_wiring(served_as(wiring, **two_by_two), "llama")
    assert checked_wiring(served_as("delayed-1", pipeline_parallel_size=2), "llama").spec == "delayed-1"


def test_a_whole_stream_is_no_pair_for_the_next_stage() -> None:
    checked_wiring(served_as("standard", "granite", pipeline_parallel_size=2), "granite")
    with pytest.raises(ValueError, match="granite hands on the whole stream"):
        checked_wiring(served_as("ladder", "granite", pipeline_parallel_size=2), "granite")


def test_gemma_in_float16_is_refused() -> None:
    config = served_as("ladder", "gemma2")
    assert checked_wiring(config, "gemma2").spec == "ladder"
    config.model_config.dtype = torch.float16
    with pytest.raises(ValueError, match="run with --dtype bfloat16"):
        checked_wiring(config, "gemma2")


def test_modules_that_communicate_are_refused() -> None:
    """vLLM's communicators are for one stream at a time."""
    config = served_as("ladder", tensor_parallel_size=2)
    config.lora_config = SimpleNamespace(fully_sharded_loras=False)
    assert checked_wiring(config, "llama").spec == "ladder"
    config.lora_config.fully_sharded_loras = True
    with pytest.raises(ValueError, match="run without --fully-sharded-loras"):
        checked_wiring(config, "llama")
    for size in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        with pytest.raises(ValueError, match="context parallelism communicates inside attention"):
            checked_wiring(served_as("ladder", tensor_parallel_size=2, **{size: 2}), "llama")
        assert checked_wiring(served_as("standard", tensor_parallel_size=2, **{size: 2}), "llama").spec == "standard"


def test_drafts_that_read_hidden_states_are_refused() -> None:
    config = served_as("ladder")
    config.speculative_config = SimpleNamespace(method="eagle3")
    with pytest.raises(ValueError, match="ngram and suffix work"):
        checked_wiring(config, "llama")


def test_passes_and_batches_that_cannot_be_followed_are_refused() -> None:
    config = served_as("ladder")
    config.compilation_config.pass_config.fuse_gemm_comms = True
    with pytest.raises(ValueError, match=r"set pass_config\.fuse_gemm_comms to false"):
        checked_wiring(config, "llama")
    with pytest.raises(ValueError, match="run without --enable-dbo"):
        checked_wiring(served_as("ladder", use_ubatching=True), "llama")


def test_an_unknown_overlap_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_LADDER_OVERLAP", "yes")
    with pytest.raises(ValueError, match="VLLM_LADDER_OVERLAP is 'yes'; choose from auto, always, never"):
        checked_wiring(served_as("ladder"), "llama")
