"""All-reduces of a rank that is alone: a kernel that copies, and ends when a link of chosen speed would have.

A model of one rank's sizes then runs as that rank of a larger group would. It serves for speed alone, the numbers are not reduced.
"""

from __future__ import annotations

from typing import Any

BLOCK, PROGRAMS = 4096, 16  # as few multiprocessors as vLLM's all-reduce takes

_nanoseconds: Any = None  # on the card, so that CUDA graphs read it anew


def set_delay(microseconds: float) -> None:
    import torch

    with torch.inference_mode():  # as it was made
        _delay().fill_(int(1000 * microseconds))
    torch.cuda.synchronize()


def all_reduce(partial: Any) -> Any:
    import torch

    from lab.serving.emulated_kernel import copy_until

    out = torch.empty_like(partial)
    copy_until[(PROGRAMS,)](partial, out, partial.numel(), _delay(), BLOCK)
    return out


def replace_all_reduces() -> None:
    """vLLM's row-parallel projections and the plugin believe that there are two ranks."""
    import torch
    from vllm.distributed.parallel_state import GroupCoordinator
    from vllm.model_executor.layers.linear import RowParallelLinear

    from ladder_residual.vllm_plugin import layer, models

    coordinator: Any = GroupCoordinator
    coordinator.all_reduce = lambda self, partial: torch.ops.vllm.all_reduce(partial, group_name=self.unique_name)
    coordinator._all_reduce_out_place = lambda self, partial: all_reduce(partial)
    projection: Any = RowParallelLinear
    if not hasattr(projection, "forward_alone"):
        projection.forward_alone = projection.forward
        projection.forward = _forward_and_reduce
    for module in (layer, models):
        module.get_tensor_model_parallel_world_size = lambda: 2  # type: ignore[attr-defined]


def _forward_and_reduce(self: Any, input_: Any) -> Any:
    from vllm.distributed import get_tp_group

    found = self.forward_alone(input_)
    if not self.reduce_results:
        return found
    output, *others = found if isinstance(found, tuple) else (found,)
    output = get_tp_group().all_reduce(output)
    return (output, *others) if isinstance(found, tuple) else output


def _delay() -> Any:
    global _nanoseconds
    if _nanoseconds is None:
        import torch

        _nanoseconds = torch.full((1,), 5000, dtype=torch.int64, device="cuda")
    return _nanoseconds
