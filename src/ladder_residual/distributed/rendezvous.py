"""What torch's elastic launcher needs to start the ranks of one host: a store for the launcher alone.

Its own rendezvous opens a port on every interface, and whoever reaches it can read and change the run's keys. The ranks started
here find each other in a file instead (``world.py``), so the store never leaves this process.
"""

from __future__ import annotations

from torch.distributed import HashStore, PrefixStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

BACKEND = "ladder-one-host"


def register() -> str:
    """Let torch's elastic launcher know this rendezvous; its name."""
    rendezvous_handler_registry.register(BACKEND, OneHostRendezvous)
    return BACKEND


class OneHostRendezvous(RendezvousHandler):
    """One node: nobody to wait for, only a store to offer."""

    def __init__(self, parameters: RendezvousParameters) -> None:
        self._run_id = parameters.run_id
        self._store = PrefixStore(parameters.run_id, HashStore())

    def get_backend(self) -> str:
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        return RendezvousInfo(self._store, 0, 1, RendezvousStoreInfo(master_addr="127.0.0.1", master_port=1))  # nobody listens

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        return True
