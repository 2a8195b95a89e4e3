"""vLLM's models of the served families, rewired. vLLM's weights, attention, sampling, LoRA and quantisation stay as they are."""

from __future__ import annotations

from typing import Any

from torch import nn
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.logger import init_logger
from vllm.model_executor.models.llama import LlamaForCausalLM
from vllm.model_executor.models.mistral import MistralForCausalLM
from vllm.model_executor.models.mixtral import MixtralForCausalLM
from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM
from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM
from vllm.model_executor.models.qwen3_moe import Qwen3MoeForCausalLM
from vllm.platforms import current_platform

from ..config import Wiring
from ..families import check_wiring, family_of
from ..hf_config import wiring_of
from . import SERVED_FAMILIES
from .inductor import keep_order_of_writes
from .layer import rewire_layers
from .link import open_link
from .plan import SUM, boundaries

logger = init_logger("vllm.ladder_residual")  # below vllm, whose handlers show it


class RewiredForCausalLM(nn.Module):
    """Mixed in before vLLM's ``...ForCausalLM``: builds it, then gives its layers the wiring its config asks for."""

    model_type: str  # the family this class builds
    mlp_name = "mlp"
    # A draft head of this kind reads hidden states between layers, which a rewired layer does not have in one piece.
    supports_eagle = False
    supports_eagle3 = False

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        wiring = checked_wiring(vllm_config, self.model_type)
        if current_platform.is_cpu():
            keep_order_of_writes()
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        model: Any = self.model
        plan = boundaries(wiring)
        through_link = get_tensor_model_parallel_world_size() > 1 and any(boundary.join == SUM for boundary in plan)
        link = open_link() if through_link else None
        rewire_layers(model.layers, model.start_layer, model.end_layer, plan, self.mlp_name, link)
        logger.info("Residual wiring: %s", wiring.spec)


def checked_wiring(vllm_config: VllmConfig, model_type: str) -> Wiring:
    """The wiring of the checkpoint, or ValueError with the reason it cannot be served so."""
    config, parallel = vllm_config.model_config.hf_config, vllm_config.parallel_config
    family = family_of(config.to_dict())
    if family.model_type != model_type:
        raise ValueError(
            f"the checkpoint is a {family.model_type}, but the architecture asked for is that of {model_type}: in --hf-overrides "
            f'name the architecture of the same family, e.g. {{"architectures": ["LadderLlamaForCausalLM"]}} for a Llama'
        )
    wiring = wiring_of(config)
    check_wiring(family, wiring)
    if wiring.kind in ("parallel", "delayed"):
        raise ValueError(f"wiring {wiring.spec} is not served with vLLM; standard, ladder, desync and no-comm are")
    wiring.check_tp(parallel.tensor_parallel_size)
    if wiring.kind in ("desync", "no-comm") and parallel.pipeline_parallel_size > 1 and parallel.tensor_parallel_size > 1:
        raise ValueError(
            f"wiring {wiring.spec} lets the streams of the ranks differ, but between pipeline stages vLLM sends each rank's slice of "
            f"one stream: run with --pipeline-parallel-size 1 (got {parallel.pipeline_parallel_size})"
        )
    if wiring.kind != "standard" and getattr(vllm_config.compilation_config.pass_config, "enable_sp", False):
        raise ValueError(
            "sequence parallelism (pass_config.enable_sp) rewrites the sums of standard layers only: switch it off"
        )
    if vllm_config.speculative_config is not None and vllm_config.speculative_config.method not in ("ngram", "suffix"):
        raise ValueError(
            f"speculative decoding with {vllm_config.speculative_config.method!r} reads hidden states that a rewired model does not "
            f"have; ngram and suffix work"
        )
    if getattr(parallel, "enable_dbo", False):
        raise ValueError(
            "dual batch overlap runs two batches at once, but sums in flight are counted for one: run without --enable-dbo"
        )
    if model_type in ("mixtral", "qwen3_moe") and (parallel.enable_expert_parallel or parallel.data_parallel_size > 1):
        raise ValueError(
            "with expert or data parallelism vLLM sums the experts' outputs inside the layer, where the sum cannot be deferred: run "
            "without --enable-expert-parallel and with --data-parallel-size 1"
        )
    return wiring


class LadderLlamaForCausalLM(RewiredForCausalLM, LlamaForCausalLM):
    model_type = "llama"


class LadderMistralForCausalLM(RewiredForCausalLM, MistralForCausalLM):
    model_type = "mistral"


class LadderQwen2ForCausalLM(RewiredForCausalLM, Qwen2ForCausalLM):
    model_type = "qwen2"


class LadderQwen3ForCausalLM(RewiredForCausalLM, Qwen3ForCausalLM):
    model_type = "qwen3"


class LadderMixtralForCausalLM(RewiredForCausalLM, MixtralForCausalLM):
    model_type = "mixtral"
    mlp_name = "block_sparse_moe"


class LadderQwen3MoeForCausalLM(RewiredForCausalLM, Qwen3MoeForCausalLM):
    model_type = "qwen3_moe"


class UnservedForCausalLM(LlamaForCausalLM):
    """Stands for the families the package can rewire but this plugin cannot."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        family = family_of(vllm_config.model_config.hf_config.to_dict())
        raise ValueError(
            f"rewired {family.model_type} checkpoints are not served with vLLM yet; served: {', '.join(SERVED_FAMILIES)}. "
            f"`ladder generate` runs this one"
        )
