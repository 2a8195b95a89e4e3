"""Where the ranks of one host meet: a store that listens on loopback alone.

torch's own rendezvous listens on every interface, whatever address it is given, and whoever reaches that port can read and
change the run's keys. Here the socket is bound before torch gets it.
"""

from __future__ import annotations

import socket
from datetime import timedelta

from torch.distributed import PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

BACKEND = "ladder-loopback"
_ADDRESS = "127.0.0.1"


def register() -> str:
    """Let torch's elastic launcher know this rendezvous; its name."""
    rendezvous_handler_registry.register(BACKEND, LoopbackRendezvous)
    return BACKEND


class LoopbackRendezvous(RendezvousHandler):
    """One node: nobody to wait for, only a store to offer."""

    def __init__(self, parameters: RendezvousParameters) -> None:
        self._run_id = parameters.run_id
        self._store: TCPStore | None = None
        self._port = 0

    def get_backend(self) -> str:
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        if self._store is None:
            listener = socket.create_server((_ADDRESS, 0))
            self._port = listener.getsockname()[1]
            self._store = TCPStore(
                _ADDRESS,
                self._port,
                is_master=True,
                timeout=timedelta(seconds=60),
                wait_for_workers=False,
                multi_tenant=True,
                master_listen_fd=listener.detach(),  # the store closes it
            )
        return RendezvousInfo(
            PrefixStore(self._run_id, self._store), 0, 1, RendezvousStoreInfo(master_addr=_ADDRESS, master_port=self._port)
        )

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        self._store = None
        return True
