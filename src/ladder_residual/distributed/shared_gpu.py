"""Several ranks of one host on one GPU: for developing and measuring tensor-parallel code on a single card.

Asked for by ``--share-gpu`` or ``LADDER_SHARE_GPU=1``. The all-reduces are real: symmetric memory within the card, or NCCL, which takes
each rank for a host of its own and goes over sockets. Without CUDA's Multi-Process Service (MPS) the ranks' kernels take turns.
"""

from __future__ import annotations

import os
import shutil
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any

VARIABLE = "LADDER_SHARE_GPU"
SM_PERCENTAGE = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"  # of the SMs, for a process; read as CUDA starts
NO_GPU = "--share-gpu needs a GPU, torch sees none: leave it out, the ranks then compute on CPUs"
NCCL_REFUSES = (
    "NCCL refuses ranks that share a GPU here, although each has an NCCL_HOSTID of its own: it needs NCCL 2.28 or newer, and NCCL_HOSTID "
    "must not be set for all ranks alike"
)
_START = "`nvidia-cuda-mps-control -d` starts it, `echo quit | nvidia-cuda-mps-control` ends it"


def share_gpu(share: bool = True) -> None:
    """Let this process and the ranks it starts share GPUs."""
    if share:
        os.environ[VARIABLE] = "1"


def is_shared() -> bool:
    value = os.environ.get(VARIABLE, "0")
    if value not in ("0", "1"):
        raise ValueError(f"the environment variable {VARIABLE} is {value!r:.40}: set it to 1 to let ranks share a GPU, or to 0")
    return value == "1"


def ranks_per_gpu(local_ranks: int, gpus: int) -> int:
    """The most ranks that one GPU of this host holds."""
    return -(-local_ranks // gpus)


def gpu_of(local_rank: int, gpus: int) -> int:
    return local_rank % gpus


def prepare(local_rank: int, local_ranks: int, gpus: int, *, one_host: bool) -> None:
    """Set what this rank's process needs before CUDA and NCCL start. What the user has set stays."""
    ranks = ranks_per_gpu(local_ranks, gpus)
    if ranks == 1:
        return
    os.environ.setdefault("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
    # MPS fails all ranks of a GPU when one of them is killed. That is told in one line, not by NCCL's watchdog with a stack.
    os.environ.setdefault("TORCH_NCCL_RETHROW_CUDA_ERRORS", "0")
    # NCCL refuses two ranks on one device of one host. Ranks with the same id are on different devices.
    os.environ.setdefault("NCCL_HOSTID", f"{socket.gethostname()}-{local_rank // gpus}")
    if one_host:
        os.environ.setdefault("NCCL_IB_DISABLE", "1")
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    if mps_state() == "on":
        os.environ.setdefault(SM_PERCENTAGE, str(100 // ranks))


def sm_percentage() -> int:
    """The share of the GPU's SMs that this process may use, in percent."""
    value = os.environ.get(SM_PERCENTAGE, "100")
    if not value.isascii() or not value.isdigit() or not 1 <= int(value) <= 100:
        raise ValueError(f"the environment variable {SM_PERCENTAGE} is {value!r:.40}: set it to a number from 1 to 100")
    return int(value)


def mps_state() -> str:
    """``on``, ``off``, ``of another user`` or ``not installed``."""
    directory = Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"))
    control = directory / "control"
    try:
        with suppress(PermissionError):  # it is there, and another user's
            os.kill(int((directory / "nvidia-cuda-mps-control.pid").read_text()), 0)
        owner = control.stat().st_uid
    except PermissionError:
        return "of another user"
    except (OSError, ValueError):
        return "off" if shutil.which("nvidia-cuda-mps-control") else "not installed"
    # One that root has started serves every user, any other its own user alone.
    return "on" if owner in (0, os.geteuid()) and os.access(control, os.W_OK) else "of another user"


def sharing(ranks: int) -> dict[str, Any]:
    """How ``ranks`` of them share a GPU, for a result."""
    return {"ranks_per_gpu": ranks, "mps": mps_state(), "sm_percentage": sm_percentage()}


def is_cuda_error(message: str) -> bool:
    """Whether an error may come from another process on the same GPU."""
    return any(sign in message for sign in ("CUDA error", "Cuda failure", "unhandled cuda error", "CUDA driver error"))


def describe(ranks: int) -> str:
    """In words, who shares a GPU and how; one line for the user."""
    state = mps_state()
    text = f"{ranks} ranks share one GPU"
    if state == "on":
        return f"{text} through MPS, each with {sm_percentage()} % of its SMs"
    fix = {
        "off": f"without MPS their kernels take turns and an all-reduce takes milliseconds: {_START}",
        "of another user": "MPS runs for another user here, so their kernels take turns: ask that user to end it, or set "
        "CUDA_MPS_PIPE_DIRECTORY to a directory of yours and start your own",
        "not installed": "this machine has no nvidia-cuda-mps-control, so their kernels take turns: it comes with the driver",
    }
    return f"{text}; {fix[state]}"
