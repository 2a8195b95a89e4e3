"""What torch's elastic launcher needs to start the ranks of one host: a store for the launcher alone.

Its own rendezvous opens a port on every interface, and whoever reaches it can read and change the run's keys. The ranks started
here find each other in a file instead (``world.py``), so the store never leaves this process.
"""

from __future__ import annotations

from torch.distributed import HashStore, PrefixStore
from torch.distributed.elastic.rendezvous import (
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

BACKEND = "ladder-one-host"


def register() -> str:
    """Let torch's elastic launcher know this rendezvous; its name."""
    rendezvous_handler_registry.register(BACKEND, OneHostRendezvous)
    return BACKEND


class OneHostRendezvous(StaticTCPRendezvous):
    """One node: nobody to wait for, only a store to offer, and that without the port of its base."""

    def __init__(self, parameters: RendezvousParameters) -> None:
        super().__init__("127.0.0.1", 1, rank=0, world_size=1, run_id=parameters.run_id, timeout=0)  # nobody listens there
        self._local = PrefixStore(parameters.run_id, HashStore())

    def get_backend(self) -> str:
        return BACKEND

    def next_rendezvous(self) -> RendezvousInfo:
        return RendezvousInfo(self._local, self.rank, self.world_size, RendezvousStoreInfo(self.master_addr, self.master_port))
