"""The boundaries between modules follow from the shared wiring functions; no engine is started here."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoConfig

from ladder_residual import Wiring
from ladder_residual.vllm_plugin.plan import Boundary, boundaries

KEPT = {
    "standard": [0, 0, 0, 0, 0, 0, 0, 0],
    "ladder": [1, 1, 1, 1, 1, 1, 1, 0],  # after the last module nothing computes that could hide its sum
    # The first ladder attention reads the stream before the last standard MLP joined it.
    "ladder:1-2": [0, 1, 1, 1, 1, 0, 0, 0],
    "ladder:0,2": [1, 0, 0, 1, 1, 0, 0, 0],
}


@pytest.mark.parametrize("spec", KEPT)
def test_a_sum_stays_in_flight_exactly_before_a_ladder_module(spec: str) -> None:
    plan = boundaries(Wiring.parse(spec, 4))
    assert [boundary.keep for boundary in plan] == KEPT[spec]
    assert {boundary.join for boundary in plan} == {"sum"}


def test_rank_dependent_wirings() -> None:
    own, mean = Boundary("own", 0), Boundary("mean", 0)
    assert boundaries(Wiring.parse("desync-2x", 2)) == [own, mean, own, mean]
    assert boundaries(Wiring.parse("no-comm", 2)) == [own] * 4
    # Layers 1-2 of four: sums after modules 4 and 8 of the chain; the standard layer above needs one stream again.
    sums, agreed = [Boundary("sum", 0)] * 2, Boundary("own", 0, agree=True)
    assert boundaries(Wiring.parse("desync-4x:1-2", 4)) == [*sums, own, mean, own, agreed, *sums]


def test_importing_the_package_does_not_import_vllm() -> None:
    code = "import sys, ladder_residual, ladder_residual.cli; sys.exit('vllm' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_without_vllm_the_plugin_says_so() -> None:
    code = "import sys; sys.modules['vllm'] = None\nimport ladder_residual.vllm_plugin"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode
    assert "needs vLLM" in done.stderr


def test_registering_twice_is_harmless() -> None:
    from ladder_residual.vllm_plugin import register
    from vllm import ModelRegistry

    register()
    register()
    assert "LadderQwen3ForCausalLM" in ModelRegistry.get_supported_archs()


def served_as(wiring: str, **parallel: Any) -> Any:
    """As much of vLLM's configuration as the check reads."""
    sizes = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1, "data_parallel_size": 1, "enable_expert_parallel": False}
    config = AutoConfig.for_model("llama", num_hidden_layers=4, wiring=wiring)
    return SimpleNamespace(
        model_config=SimpleNamespace(hf_config=config),
        parallel_config=SimpleNamespace(**(sizes | parallel)),
        compilation_config=SimpleNamespace(pass_config=SimpleNamespace()),
        speculative_config=None,
    )


def test_diverging_streams_are_not_sent_between_stages() -> None:
    from ladder_residual.vllm_plugin.models import checked_wiring

    two_by_two = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}
    assert checked_wiring(served_as("ladder", **two_by_two), "llama").spec == "ladder"
    with pytest.raises(ValueError, match="--pipeline-parallel-size 1"):
        checked_wiring(served_as("desync-2x@2", **two_by_two), "llama")


def test_drafts_that_read_hidden_states_are_refused() -> None:
    from ladder_residual.vllm_plugin.models import checked_wiring

    config = served_as("ladder")
    config.speculative_config = SimpleNamespace(method="eagle3")
    with pytest.raises(ValueError, match="ngram and suffix work"):
        checked_wiring(config, "llama")


@pytest.mark.parametrize(("piecewise", "next_is_attention"), [(True, True), (True, False), (False, True)])
def test_a_piecewise_cuda_graph_ends_with_no_sum_on_its_way(
    monkeypatch: pytest.MonkeyPatch, piecewise: bool, next_is_attention: bool
) -> None:
    """Streams cannot be played here; the order in which sums are issued and joined can."""
    import torch

    from ladder_residual.reduce import Reducer, Sum
    from ladder_residual.vllm_plugin import link as module

    events: list[str] = []

    class Recorded(Sum):
        def __init__(self, total: torch.Tensor) -> None:
            self.total = total

        def finish(self) -> torch.Tensor:
            events.append("join")
            return self.total

    class OneStream(Reducer):
        def launch(self, partial: torch.Tensor) -> Sum:
            events.append("issue")
            return Recorded(partial)

    link = object.__new__(module.Link)
    link.cuda, link.reducer = True, OneStream()
    monkeypatch.setattr(module, "_in_piecewise_graph", lambda: piecewise)
    earlier = link.start(torch.zeros(1), next_is_attention=False)
    later = link.start(torch.ones(1), next_is_attention=next_is_attention)
    at_once = piecewise and next_is_attention
    assert events == ["issue", "issue"] + (["join"] if at_once else [])
    assert [earlier.finish(), later.finish()] == [torch.zeros(1), torch.ones(1)]
    assert events.count("join") == 2  # each once
