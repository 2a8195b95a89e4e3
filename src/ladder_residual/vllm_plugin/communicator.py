"""How the ranks of vLLM's tensor-parallel group all-reduce while they compute: our reducers on vLLM's groups.

CPU: the package's asynchronous reducer, small messages over sockets (``distributed/sockets.py``), large ones over vLLM's gloo group.
CUDA: vLLM's own all-reduce, on a side stream where that pays (``overlap.py``).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from vllm.config import CUDAGraphMode
from vllm.distributed import get_pp_group, get_tp_group
from vllm.distributed.device_communicators.pynccl_allocator import is_symmetric_memory_enabled
from vllm.distributed.parallel_state import GroupCoordinator
from vllm.forward_context import get_forward_context, is_forward_context_available
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.utils.network_utils import get_ip

from ..core.reduce import CompletedWork, Reducer, ReduceWork
from ..distributed.reducers import AsyncReducer
from ..distributed.sockets import PeerSockets
from .overlap import ALWAYS, NEVER, VARIABLE, Overlap, asked, measure, module_bytes
from .versions import checked, graphs_for_decode_only, second_nccl

logger = init_logger("vllm.ladder_residual")

# Ranks compile on their own before their first all-reduce; the slowest may take minutes longer.
PEER_TIMEOUT_SECONDS = 600.0
EVENTS = 8  # more than all-reduces are ever in flight


class _SideStreamWork(ReduceWork):
    def __init__(self, result: Tensor, done: torch.cuda.Event) -> None:
        self.result, self.done = result, done

    def wait(self) -> Tensor:
        torch.cuda.current_stream().wait_event(self.done)
        return self.result


class InLineReducer(Reducer):
    """vLLM's all-reduce where it is called."""

    def __init__(self, group: GroupCoordinator) -> None:
        self.group, self.size, self.rank = group, group.world_size, group.rank_in_group

    def launch(self, partial: Tensor) -> ReduceWork:
        return CompletedWork(self.group._all_reduce_out_place(partial))


class _SideStream:
    """One communicator and the stream of its all-reduces, which run one after the other."""

    def __init__(self, all_reduce: Callable[[Tensor], Tensor]) -> None:
        self.all_reduce = all_reduce
        # An all-reduce of few blocks starts as soon as any block of the module beside it ends.
        self.stream = torch.cuda.Stream(priority=-1)
        self.ready = torch.cuda.Event()
        self.events: deque[torch.cuda.Event] = deque()

    def launch(self, partial: Tensor) -> ReduceWork:
        self.ready.record()
        with torch.cuda.stream(self.stream):
            self.stream.wait_event(self.ready)
            result = self.all_reduce(partial)
            done = self._event()
            done.record(self.stream)
        return _SideStreamWork(result, done)

    def _event(self) -> torch.cuda.Event:
        """In turn; more than can be in flight at once."""
        if len(self.events) < EVENTS:
            self.events.append(torch.cuda.Event())
        else:
            self.events.rotate(-1)
        return self.events[-1]


class SideStreamReducer(Reducer):
    """vLLM's all-reduce on a stream of its own, so that the main stream goes on computing.

    Where NCCL reduces every message, two communicators take turns: over a slow link the next all-reduce then need not wait for the one
    before it.

    No ``record_stream``: the partial stays referenced until the boundary that waits, and a side stream waits for the main one at
    each start, hence after every read of the result whose memory it may reuse.
    """

    def __init__(self, group: GroupCoordinator) -> None:
        self.size, self.rank = group.world_size, group.rank_in_group
        second = second_nccl(group)
        self.streams = deque(_SideStream(each) for each in (group._all_reduce_out_place, second) if each is not None)

    def launch(self, partial: Tensor) -> ReduceWork:
        self.streams.rotate(-1)
        return self.streams[-1].launch(partial)


class ChoosingReducer(Reducer):
    """In line or beside, by the number of tokens."""

    def __init__(self, in_line: Reducer, beside: Reducer, overlap: Overlap) -> None:
        self.in_line, self.beside, self.overlap = in_line, beside, overlap
        self.size, self.rank = beside.size, beside.rank

    def launch(self, partial: Tensor) -> ReduceWork:
        return (self.beside if self.overlap.of(partial.shape[0]) else self.in_line).launch(partial)


class Communicator:
    """The all-reduces of this process that are in flight, oldest first. One per process: a worker has one tensor-parallel group."""

    def __init__(self, group: GroupCoordinator) -> None:
        self.group = group
        self.in_flight: deque[ReduceWork] = deque()
        self.cuda = current_platform.is_cuda_alike()
        self.overlap = NEVER if self.cuda else Overlap(((1, True),))
        self.timed_graphs: list[torch.cuda.CUDAGraph] = []
        self.in_line: Reducer = InLineReducer(group)
        self.reducer: Reducer = self.in_line if self.cuda else _cpu_reducer(group)

    def choose_overlap(self, vllm_config: Any) -> None:
        """As ``VLLM_LADDER_OVERLAP`` says, or on CUDA by measurement, by all ranks together. A CPU's always pay."""
        mode = asked()
        if self.cuda:
            self._choose_on_cuda(mode, vllm_config)
        elif mode == "never":
            self.overlap = NEVER
        if self.group.rank_in_group == 0:
            logger.info("All-reduces run %s (%s=%s)", self.overlap, VARIABLE, mode)

    def _choose_on_cuda(self, mode: str, vllm_config: Any) -> None:
        if mode == "never" or is_symmetric_memory_enabled():  # of NCCL: its memory is for vLLM's own graphs and the main stream
            return
        beside = SideStreamReducer(self.group)
        self.overlap = ALWAYS if mode == "always" else self._measured(vllm_config, beside)
        self.reducer = ChoosingReducer(self.in_line, beside, self.overlap)
        if self.overlap.without_graphs:
            graphs_for_decode_only(vllm_config)

    def _measured(self, vllm_config: Any, beside: Reducer) -> Overlap:
        model = checked(vllm_config, "model_config")
        config, dtype = checked(model, "hf_text_config"), checked(model, "dtype")
        weight_bytes = dtype.itemsize if checked(model, "quantization") is None else 1
        # Under sleep mode's allocator nothing is captured as the model is built.
        eager = checked(model, "enforce_eager") or checked(model, "enable_sleep_mode")
        return measure(
            self.group,
            get_pp_group(),
            self.in_line,
            beside,
            config.hidden_size,
            module_bytes(config, self.group.world_size, weight_bytes),
            dtype,
            checked(vllm_config, "scheduler_config", "max_num_batched_tokens"),
            0 if eager else checked(vllm_config, "compilation_config", "max_cudagraph_capture_size") or 0,
            self.timed_graphs,
            checked(vllm_config, "compilation_config", "pass_config", "fuse_allreduce_rms"),
        )

    def start(self, partial: Tensor, *, next_is_attention: bool) -> None:
        reducer = self.reducer
        if self.cuda and next_is_attention and _in_piecewise_graph():
            # A piecewise CUDA graph ends at attention; a fork of streams cannot be joined in the next graph. vLLM's all-reduces are for
            # one stream at a time, so those in flight are waited for first.
            self.in_flight = deque(CompletedWork(work.wait()) for work in self.in_flight)
            reducer = self.in_line
        self.in_flight.append(reducer.launch(partial))

    def wait_for_oldest(self) -> Tensor:
        return self.in_flight.popleft().wait()

    def drain(self) -> None:
        """Nothing is in flight: vLLM may wait for something of its own next, so our messages are completed first."""
        self.reducer.drain()

    @property
    def replaces_blocking(self) -> bool:
        """Whether an all-reduce that is waited for at once is better done here too: over a network gloo takes two trips, we one."""
        return not self.cuda and not getattr(self.group.device_communicator, "supports_tensor_dict", False)


_opened: list[Communicator] = []  # the custom ops find it here: an op takes tensors and numbers, no objects


def open_communicator() -> Communicator:
    """Called by all ranks of the group together, as they build the model."""
    if not _opened or _opened[0].group is not get_tp_group():
        _opened[:] = [Communicator(get_tp_group())]
    return _opened[0]


def communicator() -> Communicator:
    assert _opened, "a rewired layer ran before its model was built"
    return _opened[0]


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
