"""How the ranks of vLLM's tensor-parallel group sum while they compute: our reducers on vLLM's groups.

CPU: the package's asynchronous reducer, small messages over plain sockets (``sockets.py``), large ones over vLLM's gloo group.
CUDA: vLLM's own all-reduce, issued on a side stream.
"""

from __future__ import annotations

from collections import deque

import torch
import torch.distributed as dist
from torch import Tensor
from vllm.config import CUDAGraphMode
from vllm.distributed import get_tp_group
from vllm.distributed.parallel_state import GroupCoordinator
from vllm.forward_context import get_forward_context, is_forward_context_available
from vllm.platforms import current_platform
from vllm.utils.network_utils import get_ip

from ..reduce import AsyncReducer, Reducer, Sum, _Ready
from ..sockets import PeerSockets

# Ranks compile on their own before their first sum; the slowest may take minutes longer.
PEER_TIMEOUT_SECONDS = 600.0


class _OnSideStream(Sum):
    def __init__(self, total: Tensor, done: torch.cuda.Event) -> None:
        self.total, self.done = total, done

    def finish(self) -> Tensor:
        torch.cuda.current_stream().wait_event(self.done)
        return self.total


class SideStreamReducer(Reducer):
    """vLLM's all-reduce on a stream of its own, so that the main stream goes on computing.

    No ``record_stream``: the partial stays referenced until the boundary that waits, and the side stream waits for the main one at
    each start, hence after every read of the total whose memory it may reuse.
    """

    def __init__(self, group: GroupCoordinator) -> None:
        self.group, self.size, self.rank = group, group.world_size, group.rank_in_group
        self.stream = torch.cuda.Stream()

    def launch(self, partial: Tensor) -> Sum:
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            total = self.group._all_reduce_out_place(partial)
            done = torch.cuda.Event()
            done.record(self.stream)
        return _OnSideStream(total, done)


class Link:
    """The sums of this process that are on their way, oldest first. One per process: a worker has one tensor-parallel group."""

    def __init__(self, group: GroupCoordinator) -> None:
        self.group = group
        self.in_flight: deque[Sum] = deque()
        self.cuda = current_platform.is_cuda_alike()
        self.reducer: Reducer = SideStreamReducer(group) if self.cuda else _cpu_reducer(group)

    def start(self, partial: Tensor, *, next_is_attention: bool) -> Sum:
        started = self.reducer.launch(partial)
        if self.cuda and next_is_attention and _in_piecewise_graph():
            # A piecewise CUDA graph ends at attention; a fork of streams cannot be joined in the next graph. On the side stream
            # all the same: another sum may be on its way there, and vLLM's all-reduces are for one stream at a time.
            return _Ready(started.finish())
        return started

    def finish(self, started: Sum) -> Tensor:
        """The most recent sum, with nothing left in flight: vLLM may wait for something of its own next, so our share of the
        traffic comes to an end first."""
        total = started.finish()
        self.reducer.settle()
        return total

    @property
    def replaces_blocking_sums(self) -> bool:
        """Whether a sum that is waited for at once is better done here too: over a network gloo takes two trips, we one."""
        return not self.cuda and not getattr(self.group.device_communicator, "supports_tensor_dict", False)


_links: list[Link] = []  # the custom ops reach their process's link here: an op takes tensors and numbers, no objects


def open_link() -> Link:
    """Called by all ranks of the group together, as they build the model."""
    if not _links or _links[0].group is not get_tp_group():
        _links[:] = [Link(get_tp_group())]
    return _links[0]


def link() -> Link:
    assert _links, "a rewired layer ran before its model was built"
    return _links[0]


def _in_piecewise_graph() -> bool:
    if not is_forward_context_available():
        return False
    return get_forward_context().cudagraph_runtime_mode == CUDAGraphMode.PIECEWISE


def _cpu_reducer(group: GroupCoordinator) -> AsyncReducer:
    addresses: list[str] = [""] * group.world_size
    dist.all_gather_object(addresses, get_ip(), group=group.cpu_group)
    host = "127.0.0.1" if len(set(addresses)) == 1 else addresses[group.rank_in_group]
    # Several groups of one world (pipeline stages) share its store.
    name = "ladder_residual/" + "-".join(map(str, group.ranks))
    store = dist.PrefixStore(name, dist.distributed_c10d._get_default_store())
    sockets = PeerSockets(store, group.rank_in_group, group.world_size, host, PEER_TIMEOUT_SECONDS)
    return AsyncReducer(group.device_group, sockets)
