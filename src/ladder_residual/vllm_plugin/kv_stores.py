"""KV stores outside the process (LMCache, Mooncake, file and object tiers, NIXL's handshake) name entries by vLLM's model name.

That name is the checkpoint's directory. One directory can be served with several wirings (``--hf-overrides``), whose keys and values
differ, so a connector is given a name that holds the wiring too.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from ..core.config import RANK_DEPENDENT
from .routing import named_wiring
from .versions import checked, wrap

# These name entries by tokens alone, so nothing can keep those of two wirings apart.
KEYED_BY_TOKENS = ("ExampleConnector", "FlexKVConnectorV1", "HF3FSKVConnector")


def store_name(vllm_config: Any) -> str:
    """The model's name for KV stores; vLLM's own for a standard wiring, whose entries vLLM's own model may share."""
    name = checked(vllm_config, "model_config", "model")
    wiring = named_wiring(checked(vllm_config, "model_config", "hf_config").to_dict())
    if wiring is None or wiring.kind == "standard":
        return name
    if wiring.kind in RANK_DEPENDENT:
        wiring = replace(wiring, tp=checked(vllm_config, "parallel_config", "tensor_parallel_size"))
    # "@" and "/" separate the parts of a key in some stores.
    return f"{name.rstrip('/')}--{wiring.spec.replace('@', '-tp')}"


def name_wirings_in_kv_stores() -> None:
    """Let vLLM's factory of KV connectors show them ``store_name``. Idempotent."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    def create_named(create: Any) -> Any:
        def create_connector(config: Any, *args: Any, **kwargs: Any) -> Any:
            return create(with_store_name(config), *args, **kwargs)

        return create_connector

    wrap(KVConnectorFactory, "create_connector", create_named)


def with_store_name(vllm_config: Any) -> Any:
    name = store_name(vllm_config)
    if name == vllm_config.model_config.model:
        return vllm_config
    transfer = checked(vllm_config, "kv_transfer_config")
    for connector in _connectors(checked(transfer, "kv_connector"), checked(transfer, "kv_connector_extra_config")):
        if connector in KEYED_BY_TOKENS:
            raise ValueError(
                f"{connector} names its entries by tokens alone and would mix those of several wirings: choose a KV connector that "
                f"names them by model, e.g. OffloadingConnector or LMCacheConnectorV1"
            )
    named = copy.copy(vllm_config)  # the parts are shared: what a connector sets in them is seen by all
    named.model_config = copy.copy(vllm_config.model_config)
    named.model_config.model = name
    return named


def _connectors(connector: Any, extra: Mapping[str, Any] | None) -> Iterator[Any]:
    """This one, and those inside: MultiConnector makes others, which may be of its kind."""
    yield connector
    for each in (extra or {}).get("connectors") or ():
        yield from _connectors(each.get("kv_connector"), each.get("kv_connector_extra_config"))
