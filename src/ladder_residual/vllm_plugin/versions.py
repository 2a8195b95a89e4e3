"""The vLLM releases the plugin runs on, and where their interfaces differ.

vLLM's objects take any attribute. A field that a release renamed would be set, or read as its default, without a word: then
experts are summed twice, or a pass rewrites all-reduces that are not there. So fields are set and read through here.
"""

from __future__ import annotations

import functools
import inspect
import logging
import re
from collections.abc import Callable
from typing import Any

OLDEST, NEWEST = (0, 26), (0, 33)
INSTALL = 'pip install "vllm>=0.26,<0.34"'

logger = logging.getLogger("vllm.ladder_residual")  # below vllm, whose handlers show it

# Sequence parallelism and AsyncTP (`pass_config.enable_sp`, `fuse_gemm_comms`) left vLLM with this release.
WITHOUT_SEQUENCE_PARALLELISM = (0, 32)
# From here on vLLM's first model runner, too, counts the NaN in logits without waiting for the GPU.
COUNTS_WITHOUT_WAITING = (0, 28)


def installed() -> str:
    import vllm

    return vllm.__version__


def release() -> tuple[int, int] | None:
    """Major and minor number; None for a build that does not say (a source tree without tags)."""
    numbers = re.match(r"(\d+)\.(\d+)\.\d", installed())
    return (int(numbers[1]), int(numbers[2])) if numbers else None


def check_version() -> None:
    """ValueError if rewired models are not known to run on the installed vLLM."""
    found = release()
    if found is not None and not OLDEST <= found <= NEWEST:
        oldest, newest = (".".join(map(str, version)) for version in (OLDEST, NEWEST))
        raise ValueError(f"rewired models are served with vLLM {oldest} to {newest}, but {installed()} is installed: {INSTALL}")
    if _not_wrapped:
        raise ValueError(_lacks(sorted(_not_wrapped)[0]))


def _lacks(name: str) -> str:
    return f"vLLM {installed()} has no {name}, which the ladder plugin needs: {INSTALL}"


def checked(config: Any, *names: str) -> Any:
    """A field, or one of a field's fields and so on; each must exist."""
    for name in names:
        if not hasattr(config, name):
            raise ValueError(_lacks(f"{type(config).__name__}.{name}"))
        config = getattr(config, name)
    return config


_not_wrapped: set[str] = set()  # of this process


def wrap(owner: Any, name: str, wrapper: Callable[[Any], Any]) -> None:
    """Replace a function of vLLM by ``wrapper`` of it, once. Where it is missing vLLM's own models must run all the same, and
    ``check_version`` refuses the others."""
    function, called = getattr(owner, name, None), f"{owner.__name__}.{name}"
    if function is None:
        _not_wrapped.add(called)
        logger.error("%s. Rewired models are not served, and a wiring in --hf-overrides is ignored", _lacks(called))
    elif not getattr(function, "wrapped_by_ladder", False):
        wrapped: Any = functools.wraps(function)(wrapper(function))
        wrapped.wrapped_by_ladder = True
        # A class method comes bound to its class; a method is bound when it is called.
        setattr(owner, name, staticmethod(wrapped) if inspect.ismethod(function) else wrapped)


def leave_unreduced(projection: Any) -> None:
    """A row-parallel projection hands back this rank's partial."""
    checked(projection, "reduce_results")
    projection.reduce_results = False


def leave_experts_unreduced(experts: Any) -> None:
    config = checked(experts, "moe_config")
    checked(config, "skip_final_all_reduce")
    config.skip_final_all_reduce = True


def sequence_parallel_passes(vllm_config: Any) -> list[str]:
    """The passes in use that turn all-reduces into reduce-scatter and all-gather."""
    passes = checked(vllm_config, "compilation_config", "pass_config")
    names = ("enable_sp", "fuse_gemm_comms")
    found = release()
    if found is not None and found < WITHOUT_SEQUENCE_PARALLELISM:
        return [name for name in names if checked(passes, name)]
    return [name for name in names if getattr(passes, name, False)]


def runs_two_batches(parallel_config: Any) -> bool:
    """Dual batch overlap, or batches split in another number of parts."""
    return checked(parallel_config, "use_ubatching")


def counting_waits(vllm_config: Any) -> bool:
    """Whether vLLM would wait for the GPU at every step to count the NaN in logits, where it does not wait otherwise."""
    from vllm.platforms import current_platform

    found = release()
    if found is None or found >= COUNTS_WITHOUT_WAITING or current_platform.is_cpu():
        return False
    asynchronous = checked(vllm_config, "scheduler_config", "async_scheduling")
    return bool(asynchronous) and not checked(vllm_config, "use_v2_model_runner")


def second_nccl(group: Any) -> Callable[[Any], Any] | None:
    """The all-reduce of another NCCL communicator of the same ranks; None where NCCL does not reduce every message."""
    # What vLLM tries before NCCL, by message size: five kinds in 0.26, six in 0.30 (FlashInfer's over PCIe).
    fields = getattr(group.device_communicator, "__dict__", {})
    kinds = {name: kind for name, kind in fields.items() if name.endswith("_comm") and kind is not None}
    nccl = kinds.pop("pynccl_comm", None)
    if nccl is None or nccl.disabled or any(not getattr(other, "disabled", False) for other in kinds.values()):
        return None
    return type(nccl)(group=group.cpu_group, device=group.device).all_reduce


def graphs_for_decode_only(vllm_config: Any) -> None:
    """Prompts without CUDA graphs: a piecewise graph ends at attention, and no all-reduce can be in flight there."""
    from vllm.config import CUDAGraphMode

    compilation = checked(vllm_config, "compilation_config")
    if checked(compilation, "cudagraph_mode") == CUDAGraphMode.FULL_AND_PIECEWISE:
        compilation.cudagraph_mode = CUDAGraphMode.FULL_DECODE_ONLY
        logger.info("CUDA graphs for decode alone: prompts then hide both all-reduces of a layer")


def note_in_compile_cache(vllm_config: Any, name: str, value: Any) -> None:
    """Graphs compiled for another value are not used: vLLM's cache goes by its config, which does not know what the plugin chose."""
    noted = checked(vllm_config, "additional_config")
    if not isinstance(noted, dict):
        raise ValueError(f"--additional-config must be JSON for rewired models, got a {type(noted).__name__}")
    vllm_config.additional_config = noted | {name: value}
