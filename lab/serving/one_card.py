"""Several vLLM ranks on one GPU, for measurements: a vLLM plugin that does nothing unless RANKS_ON_ONE_CARD names a transport.

``nccl``: a host id for each rank's process, so NCCL takes them for machines of their own and goes over TCP sockets. ``ipc``: vLLM's own
all-reduce over shared memory handles, with gloo beside it; NCCL is not used. The ranks' kernels run at the same time only under the CUDA
Multi-Process Service (``lab.serving.gpu`` starts it).

``emulated``: one rank whose model stands for one rank of many. Wherever it would all-reduce it copies, and takes as long as was set.
"""

from __future__ import annotations

import functools
import os
from typing import Any

from lab.serving import emulated_all_reduce

VARIABLE = "RANKS_ON_ONE_CARD"
TRANSPORTS = ("nccl", "ipc", "emulated")
RANKS = 8  # as many devices as vLLM believes there are
LARGEST = 65 * 2**20  # bytes of one all-reduce: 8192 tokens of a hidden size of 4096, in bf16
GATHER_BYTES = 4 * 2**20  # of one all-reduce that gathers; vLLM's takes up to 8 MiB

ENVIRONMENT = {
    "nccl": {"NCCL_IB_DISABLE": "1", "NCCL_SOCKET_IFNAME": "lo", "NCCL_NVLS_ENABLE": "0"},
    "ipc": {"VLLM_DISABLE_PYNCCL": "1"},
    "emulated": {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"},  # for setting the time while the engine runs
}


def environment(transport: str) -> dict[str, str]:
    """Of a process that starts such an engine."""
    local = {"VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
    return {VARIABLE: transport, "VLLM_ALLREDUCE_USE_SYMM_MEM": "0", **local, **ENVIRONMENT[transport]}


def register() -> None:
    """Called by vLLM in its processes; its workers are forked from one that was."""
    transport = os.environ.get(VARIABLE)
    if not transport:
        return
    if transport not in TRANSPORTS:
        raise ValueError(f"{VARIABLE} must be one of {', '.join(TRANSPORTS)}, got {transport!r}")
    if transport == "emulated":
        emulated_all_reduce.replace_all_reduces()
        return
    import torch
    from vllm.platforms import current_platform
    from vllm.v1.worker import gpu_worker

    platform: Any = type(current_platform)
    platform.logical_device_id_to_visible_device_id = classmethod(lambda cls, device_id: 0)
    platform.device_count = classmethod(lambda cls: RANKS)
    torch.accelerator.device_count = lambda: RANKS
    if transport == "nccl":
        _give_each_rank_a_host(gpu_worker)
    else:
        _reduce_over_ipc(platform)


def _give_each_rank_a_host(gpu_worker: Any) -> None:
    """NCCL reads the variable at a process's first communicator; set earlier, forked workers would share it."""
    initialise = gpu_worker.init_worker_distributed_environment
    if getattr(initialise, "gives_a_host", False):
        return

    @functools.wraps(initialise)
    def with_host(*arguments: Any, **options: Any) -> Any:
        os.environ["NCCL_HOSTID"] = f"rank-{os.getpid()}"
        return initialise(*arguments, **options)

    with_host.gives_a_host = True  # type: ignore[attr-defined]
    gpu_worker.init_worker_distributed_environment = with_host


def _reduce_over_ipc(platform: Any) -> None:
    """vLLM's own all-reduce asks whether the ranks' cards reach each other; one card does."""
    from vllm.distributed.device_communicators import custom_all_reduce
    from vllm.distributed.device_communicators.cuda_communicator import CudaCommunicator

    platform.dist_backend = "gloo"
    platform.is_fully_connected = classmethod(lambda cls, device_ids: True)
    custom_all_reduce._can_p2p = lambda rank, world_size: True
    reducer: Any = custom_all_reduce.CustomAllreduce
    reducer.__init__.__defaults__ = (LARGEST, *reducer.__init__.__defaults__[1:])  # beyond it gloo would go through the host
    communicator: Any = CudaCommunicator
    communicator.all_gather = gather_by_all_reduce


def gather_by_all_reduce(self: Any, input_: Any, dim: int = -1) -> Any:
    """Gloo gathers no CUDA tensors. Every rank adds its part to zeros, in pieces that vLLM's all-reduce takes."""
    moved = input_.movedim(dim, 0).contiguous()
    gathered = moved.new_zeros((self.world_size, *moved.shape))
    gathered[self.rank_in_group] = moved
    flat = gathered.view(-1)
    step = GATHER_BYTES // flat.element_size()
    for start in range(0, flat.numel(), step):
        piece = flat[start : start + step]
        piece.copy_(self.all_reduce(piece))
    return gathered.flatten(0, 1).movedim(0, dim).contiguous()  # vLLM's sampler takes a token's logits to lie side by side
