"""What the kernels and their tiles depend on of a GPU."""

from __future__ import annotations

import torch


def sm_count(device: torch.device) -> int:
    """Two on a CPU: the interpreter runs programs one after another, but persistent kernels should still have more than one."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def max_shared_memory(device: torch.device) -> int:
    """Bytes per program; on a CPU those of a Hopper GPU."""
    if device.type != "cuda":
        return 227 << 10
    from triton.runtime import driver

    index = torch.cuda.current_device() if device.index is None else device.index
    return driver.active.utils.get_device_properties(index)["max_shared_mem"]


def is_hopper(device: torch.device) -> bool:
    """Hopper or later: PDL and bulk prefetches into L2."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
