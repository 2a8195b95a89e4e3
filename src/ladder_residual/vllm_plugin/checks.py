"""What vLLM can do and a rewired model cannot: refused as the model is built, with the reason and the fix."""

from __future__ import annotations

from typing import Any

import torch

from ..core.config import RANK_DEPENDENT, Wiring
from ..models.families import check_wiring, family_of
from ..models.hf_config import wiring_of
from .overlap import asked
from .plan import boundaries
from .versions import check_version, checked, runs_two_batches, sequence_parallel_passes

MIXTURES = ("mixtral", "qwen2_moe", "qwen3_moe")


def checked_wiring(vllm_config: Any, model_type: str) -> Wiring:
    """The wiring of the checkpoint, or ValueError with the reason it cannot be served so."""
    check_version()
    asked()
    model_config = checked(vllm_config, "model_config")
    config = checked(model_config, "hf_config")
    family = family_of(config.to_dict())
    if family.model_type != model_type:
        raise ValueError(
            f"the checkpoint is a {family.model_type}, but the architecture asked for is that of {model_type}: in --hf-overrides "
            f'name the architecture of the same family, e.g. {{"architectures": ["LadderLlamaForCausalLM"]}} for a Llama'
        )
    wiring = wiring_of(config)
    check_wiring(family, wiring)
    boundaries(wiring)  # refuses what the layers here cannot run
    if model_type in ("gemma2", "gemma3_text") and checked(model_config, "dtype") == torch.float16:
        raise ValueError(f"{model_type} overflows in float16: run with --dtype bfloat16")  # vLLM knows it by model_type
    speculative = checked(vllm_config, "speculative_config")
    if speculative is not None and (method := checked(speculative, "method")) not in ("ngram", "suffix"):
        raise ValueError(
            f"speculative decoding with {method!r} may read hidden states that a rewired model does not have; ngram and "
            f"suffix work"
        )
    _check_parallel(checked(vllm_config, "parallel_config"), wiring, model_type)
    if wiring.kind != "standard":
        _check_communication(vllm_config, wiring)
    return wiring


def _check_parallel(parallel: Any, wiring: Wiring, model_type: str) -> None:
    tensor, stages = checked(parallel, "tensor_parallel_size"), checked(parallel, "pipeline_parallel_size")
    wiring.check_tp(tensor)
    if wiring.kind in RANK_DEPENDENT and stages > 1 and tensor > 1:
        raise ValueError(
            f"wiring {wiring.spec} lets the streams of the ranks differ, but between pipeline stages vLLM sends each rank's slice of "
            f"one stream: run with --pipeline-parallel-size 1 (got {stages})"
        )
    if model_type == "granite" and wiring.kind != "standard" and stages > 1:
        raise ValueError(
            f"vLLM's granite hands on the whole stream between pipeline stages, but wiring {wiring.spec} needs its last output apart: "
            f"run with --pipeline-parallel-size 1 (got {stages})"
        )
    if model_type in MIXTURES and (checked(parallel, "enable_expert_parallel") or checked(parallel, "data_parallel_size") > 1):
        raise ValueError(
            "with expert or data parallelism vLLM reduces the experts' outputs inside the layer, where the all-reduce cannot be deferred: "
            "run without --enable-expert-parallel and with --data-parallel-size 1"
        )
    if runs_two_batches(parallel):
        raise ValueError(
            "dual batch overlap runs two batches at once, but all-reduces in flight are counted for one: run without --enable-dbo "
            "and --ubatch-size"
        )


def _check_communication(vllm_config: Any, wiring: Wiring) -> None:
    parallel, lora = checked(vllm_config, "parallel_config"), checked(vllm_config, "lora_config")
    if passes := sequence_parallel_passes(vllm_config):
        raise ValueError(
            f"sequence parallelism (AsyncTP) rewrites the all-reduces of standard layers only: set pass_config.{passes[0]} to false in "
            f"--compilation-config"
        )
    if checked(parallel, "tensor_parallel_size") == 1:
        return
    # vLLM's communicators are for one stream at a time, so a module must not communicate while an all-reduce is in flight.
    if lora is not None and checked(lora, "fully_sharded_loras"):
        raise ValueError(
            f"fully sharded LoRA all-reduces inside the modules, where wiring {wiring.spec} has all-reduces of its own in flight: run "
            f"without --fully-sharded-loras"
        )
    if checked(parallel, "decode_context_parallel_size") > 1 or checked(parallel, "prefill_context_parallel_size") > 1:
        raise ValueError(
            f"context parallelism communicates inside attention, where wiring {wiring.spec} has all-reduces of its own in flight: run "
            f"with --decode-context-parallel-size 1 and --prefill-context-parallel-size 1"
        )
