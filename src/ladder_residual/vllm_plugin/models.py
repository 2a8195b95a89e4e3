"""vLLM's models of the served families, rewired. vLLM's weights, attention, sampling, LoRA and quantisation stay as they are."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.logger import init_logger
from vllm.model_executor.models.gemma import GemmaForCausalLM
from vllm.model_executor.models.gemma2 import Gemma2ForCausalLM
from vllm.model_executor.models.gemma3 import Gemma3ForCausalLM
from vllm.model_executor.models.granite import GraniteForCausalLM
from vllm.model_executor.models.llama import LlamaForCausalLM
from vllm.model_executor.models.mistral import MistralForCausalLM
from vllm.model_executor.models.mixtral import MixtralForCausalLM
from vllm.model_executor.models.phi3 import Phi3ForCausalLM
from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM
from vllm.model_executor.models.qwen2_moe import Qwen2MoeForCausalLM
from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM
from vllm.model_executor.models.qwen3_moe import Qwen3MoeForCausalLM
from vllm.platforms import current_platform

from ..models.families import FAMILIES, family_of
from ..models.finite import NonFiniteError, fix_for, is_finite
from . import SERVED_FAMILIES, UNSERVED
from .checks import checked_wiring
from .communicator import open_communicator
from .inductor import keep_order_of_writes
from .layer import Parts, rewire_layers
from .nonfinite import as_nan, count_nans
from .plan import OWN_FIRST, REDUCED, boundaries
from .versions import note_in_compile_cache

logger = init_logger("vllm.ladder_residual")  # below vllm, whose handlers show it


class RewiredForCausalLM(nn.Module):
    """Mixed in before vLLM's ``...ForCausalLM``: builds it, then gives its layers the wiring its config asks for."""

    model_type: str  # the family this class builds
    mlp_name = "mlp"
    pairs = True  # its layers hand on (hidden_states, residual)
    # A draft head of this kind reads hidden states between layers, which a rewired layer does not have complete.
    supports_eagle = False
    supports_eagle3 = False

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        wiring = checked_wiring(vllm_config, self.model_type)
        if current_platform.is_cpu():
            keep_order_of_writes()
        plan = boundaries(wiring)
        communicator = None
        if get_tensor_model_parallel_world_size() > 1 and any(each.joins in (REDUCED, OWN_FIRST) for each in plan):
            communicator = open_communicator()
            if any(each.in_flight for each in plan):
                communicator.choose_overlap(vllm_config)
                note_in_compile_cache(vllm_config, "ladder_overlap", communicator.overlap.anywhere)
        count_nans(vllm_config)
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.wiring = wiring
        self.dtype, self.has_drafts = vllm_config.model_config.dtype, vllm_config.speculative_config is not None
        model: Any = self.model
        for index in range(model.start_layer, model.end_layer):
            self.prepare_layer(model.layers[index], index)
        rewire_layers(model.layers, model.start_layer, model.end_layer, plan, self.parts(), communicator)
        logger.info("Residual wiring: %s", wiring.spec)

    def prepare_layer(self, layer: Any, index: int) -> None:
        """What vLLM's class does not do for the family."""

    def parts(self) -> Parts:
        """vLLM names the parts of a layer as transformers does, but for a mixture's."""
        family = FAMILIES[self.model_type]
        assert family.mlp_norm is not None
        after = (family.attention_after, family.mlp_after) if family.post_norm else (None, None)  # else they are dropouts
        return Parts(self.mlp_name, family.mlp_norm, *after, family.multiplier, self.pairs)

    def compute_logits(self, *args: Any, **kwargs: Any) -> Tensor | None:
        logits: Tensor | None = super().compute_logits(*args, **kwargs)  # type: ignore[misc]
        return None if logits is None else as_nan(logits, self.has_drafts)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """As vLLM does; weights with NaN or infinities are refused by name."""
        return super().load_weights(_finite(self._of_this_wiring(weights), self.dtype))  # type: ignore[misc]

    def _of_this_wiring(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """A parallel layer has one norm; a checkpoint that holds the other was made for another wiring."""
        wiring, norm = self.wiring, FAMILIES[self.model_type].mlp_norm
        missing = {f"layers.{index}.{norm}.weight" for index in wiring.layers} if wiring.kind == "parallel" else set()
        for name, tensor in weights:
            if name.removeprefix("model.") in missing:
                raise ValueError(
                    f"{name}: the weights are of another wiring than {wiring.spec}, whose layers have one norm where others have two: "
                    f"serve the checkpoint without --hf-overrides, or train a parallel model from scratch"
                )
            yield name, tensor


def _finite(weights: Iterable[tuple[str, Tensor]], dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """All of them, if they are finite as they are stored and as they are served; scales stay in the dtype they are stored in."""
    for name, tensor in weights:
        if tensor.dtype in (torch.float32, torch.bfloat16, torch.float16):
            if not is_finite(tensor):
                raise NonFiniteError(f"{name} holds NaN or infinite numbers: the checkpoint cannot be served")
            narrower = torch.finfo(dtype).max < torch.finfo(tensor.dtype).max and not name.endswith("scale")
            if narrower and not is_finite(tensor.to(dtype)):
                raise NonFiniteError(f"{name} cannot be served in {dtype}{fix_for(dtype)}")
        yield name, tensor


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


class LadderQwen2MoeForCausalLM(RewiredForCausalLM, Qwen2MoeForCausalLM):
    model_type = "qwen2_moe"


class LadderQwen3MoeForCausalLM(RewiredForCausalLM, Qwen3MoeForCausalLM):
    model_type = "qwen3_moe"


class LadderPhi3ForCausalLM(RewiredForCausalLM, Phi3ForCausalLM):
    model_type = "phi3"


class LadderGraniteForCausalLM(RewiredForCausalLM, GraniteForCausalLM):
    model_type = "granite"
    pairs = False


class LadderGemmaForCausalLM(RewiredForCausalLM, GemmaForCausalLM):
    model_type = "gemma"


class LadderGemma2ForCausalLM(RewiredForCausalLM, Gemma2ForCausalLM):
    model_type = "gemma2"


class LadderGemma3TextForCausalLM(RewiredForCausalLM, Gemma3ForCausalLM):
    model_type = "gemma3_text"


class _NoRotation(nn.Module):
    def forward(self, positions: Tensor, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        return query, key


class LadderSmollm3ForCausalLM(RewiredForCausalLM, LlamaForCausalLM):
    """vLLM runs SmolLM3 with transformers' layers. It is a Llama whose every fourth layer does not rotate."""

    model_type = "smollm3"

    def prepare_layer(self, layer: Any, index: int) -> None:
        config: Any = self.config
        if not config.no_rope_layers[index]:  # true for the layers that do rotate
            layer.self_attn.rotary_emb = _NoRotation()


class UnservedForCausalLM(LlamaForCausalLM):
    """Stands for the families the package can rewire but this plugin cannot."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        family = family_of(vllm_config.model_config.hf_config.to_dict())
        raise ValueError(
            f"rewired {family.model_type} checkpoints are not served with vLLM: {UNSERVED[family.model_type]}. `ladder generate` runs "
            f"them; served are {', '.join(SERVED_FAMILIES)}"
        )
