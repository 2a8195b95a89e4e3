"""How much memory is left, for those who say beforehand what they need."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def free_bytes(device: torch.device) -> int | None:
    """On a GPU also what torch holds of it without using it, and no more than this process may take. None where it cannot be known."""
    if device.type == "cuda":
        import torch

        free, total = torch.cuda.mem_get_info(device)
        used = torch.cuda.memory_allocated(device)
        allowed = int(total * torch.cuda.get_per_process_memory_fraction(device)) - used
        return min(free + torch.cuda.memory_reserved(device) - used, allowed)
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def require(need: float, device: torch.device, what: str, fix: str) -> None:
    """ValueError with both numbers unless ``need`` bytes are free."""
    free = free_bytes(device)
    if free is not None and need > free:
        raise ValueError(f"{what} needs {need / 1e9:.1f} GB, {free / 1e9:.1f} GB are free: {fix}")
