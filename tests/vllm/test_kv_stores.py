"""What KV connectors see as the model's name; no engine is started here."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoConfig

from ladder_residual.vllm_plugin import register
from ladder_residual.vllm_plugin.kv_stores import store_name


class Recording:
    """A connector of somebody else's, which vLLM's factory creates."""

    def __init__(self, config: Any, role: Any, kv_cache_config: Any) -> None:
        self.config = config


def served(wiring: str | None = None, connector: str = "Recording", tp: int = 2, **transfer: Any) -> Any:
    fields = {"wiring": wiring} if wiring else {}
    hf_config = AutoConfig.for_model("llama", num_hidden_layers=4, **fields)
    return SimpleNamespace(
        model_config=SimpleNamespace(model="/models/served/", hf_config=hf_config),
        parallel_config=SimpleNamespace(tensor_parallel_size=tp),
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=True),
        kv_transfer_config=SimpleNamespace(
            kv_connector=connector,
            kv_connector_module_path=__name__,
            engine_id="one",
            kv_connector_extra_config=transfer,
        ),
    )


def created(config: Any) -> Any:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole

    register()
    register()  # twice is harmless
    return KVConnectorFactory.create_connector(config=config, role=KVConnectorRole.WORKER, kv_cache_config=None)


def test_two_wirings_of_one_directory_never_share_entries() -> None:
    wirings = ["ladder", "ladder:1-2", "ladder:1,3", "desync-2x", "desync-2x:1,2", "desync-2x:1@2", "parallel", "no-comm"]
    names = [created(served(wiring)).config.model_config.model for wiring in wirings]
    assert names[:2] == ["/models/served--ladder", "/models/served--ladder:1-2"]
    assert len({*names, "/models/served", "/models/served/"}) == len(wirings) + 2
    assert not any("/" in name.removeprefix("/models/") or "@" in name for name in names)


def test_a_wiring_that_depends_on_the_ranks_has_their_number_in_its_name() -> None:
    assert store_name(served("desync-2x", tp=4)) == "/models/served--desync-2x-tp4"
    assert store_name(served("desync-2x@2", tp=2)) == store_name(served("desync-2x", tp=2))
    assert store_name(served("ladder", tp=4)) == store_name(served("ladder", tp=2))


@pytest.mark.parametrize("wiring", [None, "standard"])
def test_a_standard_model_keeps_its_name(wiring: str | None) -> None:
    config = served(wiring)
    assert created(config).config is config


def test_only_the_connector_sees_the_name() -> None:
    """vLLM itself reads weights from where the name says."""
    config = served("ladder")
    seen = created(config).config
    assert config.model_config.model == "/models/served/"
    assert seen.kv_transfer_config is config.kv_transfer_config


def test_stores_that_know_tokens_alone_are_refused() -> None:
    nested = served("ladder", "MultiConnector", connectors=[{"kv_connector": "HF3FSKVConnector"}])
    inside = {
        "kv_connector": "MultiConnector",
        "kv_connector_extra_config": {"connectors": [{"kv_connector": "ExampleConnector"}]},
    }
    deeper = served("ladder", "MultiConnector", connectors=[{"kv_connector": "OffloadingConnector"}, inside])
    for config in (served("ladder", "ExampleConnector"), served("ladder", "FlexKVConnectorV1"), nested, deeper):
        with pytest.raises(ValueError, match="by tokens alone"):
            created(config)
