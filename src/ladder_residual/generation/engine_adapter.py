"""The engine under ``generate``: transformers samples, stops and streams; the engine computes the logits.

``EngineModel`` is what ``GenerationMixin`` needs to see of a model. It keeps the whole sequence in ``input_ids`` and lets the engine's
own static cache remember the rest, so prompts may be padded on the left as everywhere else in this package.
"""

from __future__ import annotations

import copy
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from ..distributed.world import Rank, World
from ..engine.quantized import QuantizedWeight, Weight
from ..engine.spec import EngineSpec, RankSizes
from ..engine.weights import check_weights_stack
from ..links import Link
from ..models.candidates import Candidates, ChoosesFromCandidates
from ..models.hf_config import wiring_of
from ..models.quantization.linear import QuantizedLinear


class Engine(Protocol):
    """What ``DecodeEngine`` offers here; tests put the slow reference in its place."""

    batch: int
    max_context: int

    def prefill(self, input_ids: Tensor, lengths: Tensor) -> Tensor: ...

    def decode(self, tokens: Tensor) -> Tensor: ...

    def gather(self, logits: Tensor) -> Tensor: ...

    def decisive(self, logits: Tensor, needed: Candidates) -> Tensor: ...


class EngineModel(ChoosesFromCandidates, PreTrainedModel, GenerationMixin):
    """A causal language model whose forward is one engine. For greedy decoding and sampling; beams need a cache that reorders."""

    _supports_cache_class = False
    main_input_name = "input_ids"

    def __init__(self, config: Any, generation_config: Any, engine: Engine, device: torch.device) -> None:
        config = copy.deepcopy(config)
        config._attn_implementation = "eager"  # the parent class checks the choice; attention is the engine's
        super().__init__(config)
        self.generation_config = copy.deepcopy(generation_config)
        self.engine = engine
        self._columns = 0  # of the sequences the engine has seen
        self._needed: Candidates | None = None
        self._place = torch.nn.Parameter(torch.empty(0, device=device), requires_grad=False)  # transformers asks for our device

    @classmethod
    def can_generate(cls) -> bool:
        return True

    def prepare_inputs_for_generation(  # type: ignore[override]
        self, input_ids: Tensor, attention_mask: Tensor | None = None, **_: Any
    ) -> dict[str, Any]:
        return {"input_ids": input_ids, "attention_mask": attention_mask}

    def needs(self, candidates: Candidates | None) -> None:
        self._needed = candidates

    def start(self) -> None:
        """Forget the sequences: the next call reads a prompt."""
        self._columns = 0

    @torch.no_grad()
    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, **_: Any) -> CausalLMOutputWithPast:
        batch, columns = input_ids.shape
        if self._columns and columns == self._columns + 1:
            logits = self.engine.decode(input_ids[:, -1])
        else:
            packed, lengths = right_padded(input_ids, attention_mask)
            logits = self.engine.prefill(packed, lengths)
        self._columns = columns
        needed = self._needed
        found: Any = self.engine.gather(logits) if needed is None else self.engine.decisive(logits, needed)
        return CausalLMOutputWithPast(logits=found[:batch, None].float())


def right_padded(input_ids: Tensor, attention_mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Prompts padded on the left, moved to the left; their lengths."""
    if attention_mask is None:
        return input_ids, torch.full((input_ids.shape[0],), input_ids.shape[1])
    lengths = attention_mask.sum(-1)
    packed = torch.zeros_like(input_ids)
    for row, length in enumerate(lengths.tolist()):
        packed[row, :length] = input_ids[row][attention_mask[row].bool()]
    return packed, lengths.cpu()


def take_weights(model: PreTrainedModel) -> dict[str, Weight]:
    """By Hugging Face name; quantised ones are packed for the kernels, and taken from ``model`` one by one: no two lie there twice."""
    weights: dict[str, Weight] = {name: parameter.data for name, parameter in model.named_parameters()}
    for path, module in model.named_modules():
        if isinstance(module, QuantizedLinear):
            spec, (values, scales, zeros, _) = module.layout.spec, module.layout.numbers(module.parts)
            module.parts = {}
            size = spec.columns_of_a_scale(values.shape[1])
            zeros = zeros if spec.zero_points else None  # the kernels know the middle
            weights[f"{path}.weight"] = QuantizedWeight.pack(spec.format, values, scales, zeros, size)
    return weights


def engine_model(
    model: Any,
    rank: Rank,
    *,
    batch: int,
    max_context: int,
    schedule: str = "auto",
    reducer: str = "auto",
    kv_cache_dtype: str = "auto",
    link: Link | None = None,
    exact: bool = False,
) -> EngineModel:
    """Move a loaded rank's weights into a ``DecodeEngine``; ``model`` is empty afterwards. ValueError if the engine cannot take it.
    With a ``link`` the other ranks are emulated: an all-reduce is a copy that lasts as long as the link says. ``exact`` lets float32 in."""
    from ..engine.checks import check_kv_cache, check_request, check_weights, require_memory
    from ..engine.engine import DecodeEngine

    if rank.device.type != "cuda":
        raise ValueError(f"the CUDA engine needs a GPU, this rank computes on {rank.device.type}")
    dtype, wiring = next(model.parameters()).dtype, wiring_of(model.config)

    def checked() -> tuple[EngineSpec, dict[str, Weight]]:
        spec = EngineSpec.from_hf(model.config.to_dict(), max_context=max_context)
        check_request(spec, wiring, batch=batch, max_context=max_context, schedule=schedule, tp=rank.size, rank=rank.rank)
        check_weights(dtype, next(model.parameters()).device, exact=exact)
        sizes = RankSizes.of(spec.shape, rank.size, rank.rank)
        check_kv_cache(kv_cache_dtype, rank.device)
        require_memory(sizes, dtype, rank.device, batch=batch, max_context=max_context, kv_cache_dtype=kv_cache_dtype)
        weights = take_weights(model)
        check_weights_stack(spec, sizes, weights)
        return spec, weights

    # Once the model is empty there is no fallback, and ranks that decide differently would wait for each other: what one of them
    # refuses (its memory may be fuller) all refuse here.
    found, problem = None, None
    try:
        found = checked()
    except ValueError as error:
        problem = str(error)
    if isinstance(rank, World):
        problem = rank.first_problem(problem)
    if problem is not None or found is None:
        raise ValueError(problem)
    spec, weights = found
    del found
    groups = None
    if rank.size > 1 and link is None:
        # Two communicators: all-reduces of attention and MLP must not queue behind each other.
        ranks = list(range(rank.size))
        groups = (dist.new_group(ranks), dist.new_group(ranks))
    config, generation_config = model.config, model.generation_config
    model.to("meta")
    try:
        engine = DecodeEngine(
            spec,
            wiring,
            weights,
            tp=rank.size,
            rank=rank.rank,
            reducer="emulated" if link else reducer if rank.size > 1 else "none",
            link=link,
            groups=groups,
            batch=batch,
            max_context=max_context,
            schedule=schedule,
            kv_cache_dtype=kv_cache_dtype,
            release=True,
        )
    except ValueError as error:  # the caller must not fall back to a model that is empty now
        raise RuntimeError(f"the engine failed after it had taken the weights: {error}") from error
    return EngineModel(config, generation_config, engine, rank.device)
