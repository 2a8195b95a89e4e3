"""Logits that are NaN or infinite (float16 overflows) end the request they belong to, not the server.

vLLM samples from them as from any others: the client gets token 0 again and again. But it can count the NaN in each request's logits,
on the GPU without waiting for it, and hands the counts to its scheduler together with the tokens. A rewired model turns the count on;
the scheduler then ends a request that has any with vLLM's own error (HTTP 500) before its token is sent.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from vllm.platforms import current_platform

from ..models.finite import fix_for
from .versions import checked, counting_waits, wrap

COUNT = "VLLM_COMPUTE_NANS_IN_LOGITS"  # vLLM's own

logger = logging.getLogger("vllm.ladder_residual")


def count_nans(vllm_config: Any) -> None:
    """Called in a worker as its model is built, unless the user has chosen. Afterwards vLLM reads its variables no more."""
    from vllm import envs

    if COUNT in os.environ:
        return
    if counting_waits(vllm_config):
        logger.warning("Logits are not checked for NaN: with this vLLM each step would wait for the GPU. %s=1 does so", COUNT)
        return
    os.environ[COUNT] = "1"
    if not checked(envs, COUNT):  # remembered since another engine of this process
        envs.disable_envs_cache()


def as_nan(logits: Tensor, all_rows: bool) -> Tensor:
    """What vLLM does not count is made NaN: +inf, which only float16 gets to. ``all_rows``: with drafts a request has several rows,
    which vLLM's count by request mistakes for other requests', so any NaN is one of every request. Nothing waits for the GPU."""
    if logits.dtype == torch.float16:
        logits.masked_fill_(logits == math.inf, math.nan)
    if all_rows:
        logits.masked_fill_(logits.isnan().any(), math.nan)
    return logits


def fail_requests_with_nans() -> None:
    """Let vLLM's scheduler end them, of rewired models. Idempotent."""
    from vllm.v1.core.sched.scheduler import Scheduler

    def fail_first(update: Callable[..., Any]) -> Any:
        def fail_and_update(scheduler: Any, scheduled: Any, ran: Any, *others: Any) -> Any:
            failed = _fail(scheduler, ran) if _is_rewired(scheduler.vllm_config) else []
            outputs = update(scheduler, scheduled, ran, *others)  # leaves out what has ended
            return _with_ends(outputs, failed)

        return fail_and_update

    wrap(Scheduler, "update_from_output", fail_first)
    wrap(Scheduler, "__init__", _zero_first)


def _zero_first(init: Callable[..., None]) -> Any:
    """vLLM's attention on CPU multiplies what lies behind a sequence in its last block of the KV cache by 0, and 0 times NaN is NaN: a
    request that is given the block of one that overflowed would fail too. vLLM can zero blocks before they are used."""

    def init_zeroing(scheduler: Any, *args: Any, **given: Any) -> None:
        config, cache = given.get("vllm_config"), given.get("kv_cache_config")
        overflows = config and _is_rewired(config) and config.model_config.dtype == torch.float16
        if cache and overflows and current_platform.is_cpu():
            cache.__class__ = type("Zeroed", (type(cache),), {"needs_kv_cache_zeroing": True})
        init(scheduler, *args, **given)

    return init_zeroing


def _is_rewired(vllm_config: Any) -> bool:
    return any(name.startswith("Ladder") for name in vllm_config.model_config.architectures or ())


def _fail(scheduler: Any, ran: Any) -> list[Any]:
    """The requests that ended here."""
    counts = checked(ran, "num_nans_in_logits") or {}
    ids = [request_id for request_id, count in counts.items() if count]
    if not ids:
        return []
    from vllm.v1.request import RequestStatus

    failed: list[Any] = scheduler.finish_requests(ids, RequestStatus.FINISHED_ERROR)
    model = scheduler.vllm_config.model_config
    for request in failed:
        logger.error(
            "Request %s ends with an error: its logits are NaN or infinite (model %s, %s%s)",
            *(request.request_id, model.model, model.dtype, fix_for(model.dtype)),
        )
    return failed


def _with_ends(outputs: dict[int, Any], failed: list[Any]) -> dict[int, Any]:
    """As vLLM tells clients of a request that it could not go on with."""
    if not failed:
        return outputs
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs

    for request in failed:
        end = EngineCoreOutput(
            request_id=request.request_id,
            new_token_ids=[],
            finish_reason=request.get_finished_reason(),
            events=request.take_events(),
            trace_headers=request.trace_headers,
        )
        outputs.setdefault(request.client_index, EngineCoreOutputs()).outputs.append(end)
    return outputs
