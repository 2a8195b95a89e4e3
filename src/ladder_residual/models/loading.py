"""From a checkpoint directory to one rank's model: each rank reads only its shards.

The family's model is built without memory (meta device), then every parameter's shard is read and placed, and the modules get the
sizes of their shards. With one rank the same path loads the whole model.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from ..common.memory import require
from ..core.config import RANK_DEPENDENT, Wiring
from ..core.reduce import Reducer
from ..distributed.launch import is_out_of_memory
from ..distributed.world import Rank, World
from . import preflight
from .adapter import Adapter
from .candidates import Candidates, decisive_logits
from .families import Family
from .finite import NonFiniteError, cast_finite
from .generation_config import generation_config
from .hf import set_reducer
from .hf_config import ladder_config_class
from .parameters import check_parameters, read_parameter
from .preflight import CheckedSource
from .presets import ModelShape
from .quantization.checkpoint import QuantizedCheckpoint
from .quantization.linear import QuantizedLinear, hold_quantised
from .sharding import ROW_PARALLEL, RankHeads, ShardSpec, check_divides, rank_heads, shard_of, split

MAX_BUFFER_ELEMENTS = 1 << 26  # far above any model's rotary tables
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, as_torch) for name, as_torch in preflight.DTYPES.items()}


class VocabularyEmbedding(nn.Embedding):
    """Mixed in before the embedding's own class: this rank's rows of the table; the all-reduce brings the other ranks'."""

    first: int
    reducer: Reducer

    def forward(self, input: Tensor) -> Tensor:
        local = input - self.first
        elsewhere = (local < 0) | (local >= self.num_embeddings)
        rows = super().forward(local.clamp(0, self.num_embeddings - 1))
        return self.reducer.start(rows.masked_fill(elsewhere.unsqueeze(-1), 0)).wait()


class VocabularyHead(nn.Linear):
    """This rank's rows of the output projection; logits are gathered, unless few of them decide (``candidates``). Shorter shards
    are padded to the longest for that."""

    first: int
    vocabulary: int
    width: int
    reducer: Reducer
    candidates: Candidates | None

    def forward(self, input: Tensor) -> Tensor:
        logits = super().forward(input)  # [..., local vocabulary]
        size, gather = self.reducer.size, self.reducer.gather
        if self.candidates is not None:
            few = decisive_logits(logits, self.first, self.vocabulary, size, self.candidates, gather)
            if few is not None:
                return few
        full = gather(F.pad(logits, (0, self.width - logits.shape[-1])))  # [..., size * width]
        if size * self.width == self.vocabulary:
            return full
        longer = self.vocabulary % size or size  # ranks whose shard is `width` long; the rest are one shorter
        return torch.cat([part[..., : self.width - (rank >= longer)] for rank, part in enumerate(full.chunk(size, -1))], -1)


class BiasOnRankZero(nn.Linear):
    """A row-parallel projection on a rank other than 0: its bias is added once, on rank 0."""

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight)


class _LocalHeads:
    """The config as an attention module of this rank may see it: its own head counts, everything else unchanged."""

    def __init__(self, config: Any, heads: RankHeads) -> None:
        self._config = config
        self.num_attention_heads = heads.query[1] - heads.query[0]
        self.num_key_value_heads = heads.kv[1] - heads.kv[0]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_config" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self._config, name)


def load_model(
    source: str | Path,
    rank: Rank | None = None,
    *,
    wiring: str | None = None,
    dtype: str = "auto",
    reducer: Reducer | None = None,
    uneven: bool = False,
    attention: str | None = None,
    allow_nonfinite: bool = False,
    keep_quantised: bool = False,
    keep_act_order: bool = True,
) -> PreTrainedModel:
    """The shards of ``rank`` (default: a single one) of the checkpoint at ``source`` (directory or hub id), for inference or training.

    ``wiring`` overrides the checkpoint's own; ``reducer`` (default: asynchronous) all-reduces; ``uneven`` allows ranks with
    unequal numbers of heads; ``allow_nonfinite`` loads weights with NaN or infinities, which are refused otherwise.
    ``keep_quantised`` leaves quantised projections as they are stored, frozen, to train adapters on or for the CUDA engine, which
    reads none in act-order: these are dequantised without ``keep_act_order``, all are if ``source`` is an adapter.
    """
    rank = rank or World()
    size = rank.size
    found = preflight.check_source(
        source, tp=size, wiring=wiring, dtype=dtype, uneven=uneven, copies=size > 1, allow_nonfinite=allow_nonfinite
    )
    checkpoint, family, config = found.checkpoint, found.family, model_config(found)
    shape = ModelShape.from_hf(config.to_dict())
    check_divides(shape, family, size, uneven)  # again, with sizes that config.json leaves to the family's defaults
    checkpoint.check_cuts(shape, size)
    target = getattr(torch, found.dtype) if dtype == "auto" else DTYPES[dtype]
    if found.quantization and found.quantization.act_order:
        keep_quantised = keep_quantised and keep_act_order
    keep_quantised = keep_quantised and found.adapter is None  # whose matrices are added to plain numbers
    if rank.rank == 0:
        warn_if_rank_dependent(found.wiring, size)
        if not keep_quantised:
            warn_if_dequantised(found, shape, size, target)
    options = {"attn_implementation": attention} if attention else {}
    if isinstance(rank, World) and rank.size > 1:
        rank.check_software()
        rank.check_same(
            "the config or wiring",
            json.dumps([config.to_dict(), str(target), str(found.quantization)], sort_keys=True, default=str),
        )
        rank.check_same("the checkpoint", checkpoint.digest())
        rank.check_same("the adapter", found.adapter.digest() if found.adapter else "none")
    file = checkpoint.directory / "config.json"
    with built_from(file), torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=target, **options)
    check_parameters(model, checkpoint)
    check_buffers(model)
    check_weights_fit(model, rank, found.rank_bytes(shape, size, rank.rank, target.itemsize)[0] if keep_quantised else None)
    if keep_quantised and isinstance(checkpoint, QuantizedCheckpoint):
        left = hold_quantised(model, checkpoint, rank.device, target, partial(shard_of, model=shape, tp=size, rank=rank.rank))
        check_weights_fit(model, rank)  # what is left is dequantised
        if rank.rank == 0:
            warn_if_left(found, left, target)
    with built_from(file):
        restore_buffers(model, rank.device)
        DynamicCache(config=model.config)  # every forward makes one, of fields nobody has looked at yet

    adapter = Adapter(found.adapter, allow_nonfinite=allow_nonfinite) if found.adapter else None
    if adapter:
        adapter.check(model)

    def read(name: str, shape: tuple[int, ...], spec: ShardSpec | None) -> Tensor:
        tensor = read_parameter(checkpoint, name, shape, spec)
        if adapter:
            tensor = adapter.added(name, tensor, spec)
        if allow_nonfinite or torch.finfo(target).max >= torch.finfo(tensor.dtype).max:
            return tensor.to(target)
        try:
            return cast_finite(name, tensor, target)
        except NonFiniteError as error:
            raise NonFiniteError(f"{error}: use --dtype bfloat16 or float32") from None

    place_parameters(model, read, shape, family, rank)
    checkpoint.close()
    if generation := generation_config(checkpoint.directory, shape.vocab_size):
        model.generation_config = generation
    set_reducers(model, reducer or rank.reducer())
    return model.eval()


def check_weights_fit(model: PreTrainedModel, rank: Rank, stored: float | None = None) -> None:
    """Before the first weight is read: a GPU that is too small says so in numbers."""
    if rank.device.type != "cuda":
        return  # a host swaps, and is_out_of_memory tells what the kernel did about it
    dense = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters()) / rank.size
    fix = "use more ranks (--tp) or a dtype of fewer bytes (--dtype bfloat16)"
    require(dense if stored is None else stored, rank.device, "a rank's weights", fix)


@contextmanager
def built_from(file: Path) -> Iterator[None]:
    """Whatever a family's own code trips over in here is ``file``'s fault: nothing else went into it."""
    try:
        yield
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise ValueError(
            f"{file} does not describe a model transformers can build: {type(error).__name__}: {str(error)[:300]}"
        ) from error


def set_reducers(model: PreTrainedModel, reducer: Reducer) -> None:
    """Let every layer, the embedding and the head communicate through ``reducer``."""
    set_reducer(model, reducer)
    for module in model.modules():
        if isinstance(module, VocabularyEmbedding | VocabularyHead):
            module.reducer = reducer


def meta_model(found: CheckedSource) -> PreTrainedModel:
    """The model a checkpoint's config describes, without memory."""
    config = model_config(found)
    with built_from(found.checkpoint.directory / "config.json"), torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def model_config(found: CheckedSource) -> Any:
    try:
        return ladder_config_class(found.family.model_type).from_dict(found.fields)
    except Exception as error:  # transformers validates fields with several exception types
        file = found.checkpoint.directory / "config.json"
        raise ValueError(f"{file} is not a valid {found.family.model_type} config: {error}") from error


def warn_if_rank_dependent(wiring: Wiring, tp: int) -> None:
    if wiring.kind in RANK_DEPENDENT and wiring.tp is None:
        warnings.warn(
            f"wiring {wiring.spec} computes something else on every number of ranks, and the checkpoint does not say for how many it "
            f"was made: use the --tp it was trained with, and pin it (ladder convert ... --wiring {wiring.spec}@{tp})",
            stacklevel=3,
        )


def warn_if_dequantised(found: CheckedSource, shape: ModelShape, tp: int, target: torch.dtype) -> None:
    if found.quantization is None:
        return
    name = str(target).removeprefix("torch.")
    stored, loaded = (f"{size / 2**20:,.1f} MiB" for size in found.rank_bytes(shape, tp, 0, target.itemsize))
    activations = found.quantization.activations
    asked = "" if activations == "unquantised" else f", and activations are {name} (the checkpoint asks for {activations} fp8)"
    warnings.warn(
        f"weights in {found.quantization.describe()} are dequantised to {name}: {loaded} on a rank, {stored} as stored{asked}",
        stacklevel=3,
    )


def warn_if_left(found: CheckedSource, left: list[str], target: torch.dtype) -> None:
    """Of weights that were to stay quantised."""
    if not left or found.quantization is None:
        return
    stored = sum(found.checkpoint.stored_bytes(name, None, target.itemsize) for name in left) / 2**20
    loaded = sum(prod(found.checkpoint.shape(name)) for name in left) * target.itemsize / 2**20
    warnings.warn(
        f"{len(left)} weights in {found.quantization.describe()} are the head's or of stacked experts, and are dequantised to "
        f"{str(target).removeprefix('torch.')}: {loaded:,.1f} MiB, {stored:,.1f} MiB as stored",
        stacklevel=3,
    )


def check_buffers(model: PreTrainedModel) -> None:
    """ValueError if what is computed and not stored would take more memory than any model needs for it."""
    elements = sum(buffer.numel() for buffer in model.buffers() if buffer.is_meta)
    if elements > MAX_BUFFER_ELEMENTS:
        raise ValueError(
            f"the config calls for computed tables of {elements} numbers, more than {MAX_BUFFER_ELEMENTS}: it is wrong"
        )


def restore_buffers(model: PreTrainedModel, device: torch.device) -> None:
    """Buffers that are computed and not stored (rotary frequencies, embedding scale) get memory and their values."""
    for module in model.modules():
        own = {name: buffer for name, buffer in module._buffers.items() if buffer is not None and buffer.is_meta}
        for name, buffer in own.items():
            module._buffers[name] = torch.empty_like(buffer, device=device)
        if own:
            model._init_weights(module)  # transformers computes them here; parameters are still without memory


def place_parameters(
    model: Any,
    read: Callable[[str, tuple[int, ...], ShardSpec | None], Tensor],
    shape: ModelShape,
    family: Family,
    rank: Rank,
) -> None:
    specs: dict[str, ShardSpec | None] = {}
    tied = getattr(model.config, "tie_word_embeddings", False)
    for name, parameter in list(model.named_parameters()):
        if tied and name == "lm_head.weight":
            continue
        whole = tuple(parameter.shape)
        spec = shard_of(name, whole, shape, rank.size, rank.rank) if rank.size > 1 else None
        tensor = read(name, whole, spec).to(rank.device)
        module_name, _, leaf = name.rpartition(".")
        module = model.get_submodule(module_name)
        module._parameters[leaf] = nn.Parameter(tensor, requires_grad=parameter.requires_grad)
        specs[name] = spec
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if tied:
        head.weight = embedding.weight
    if rank.size > 1:
        _set_local_sizes(model, shape, family, rank.size, rank.rank)
    model.shard_specs = specs


def _share_of_router_loss(module: nn.Module, inputs: Any, output: Any, *, ranks: int) -> Any:
    """Router logits feed only the balancing loss, which transformers computes alike on every rank: each rank takes its part of
    that gradient, because ``finish_gradients`` adds up the parts."""
    logits, *rest = output
    return (logits / ranks + (logits * (1 - 1 / ranks)).detach(), *rest)


def _set_local_sizes(model: Any, shape: ModelShape, family: Family, tp: int, rank: int) -> None:
    heads = rank_heads(shape, tp, rank)
    local = _LocalHeads(model.config, heads)
    for layer in model.base_model.layers:
        attention = getattr(layer, family.attention)
        attention.num_key_value_groups = heads.groups
        for attribute in ("num_key_value_heads", "num_attention_heads"):
            if hasattr(attention, attribute):
                setattr(attention, attribute, getattr(local, attribute))
        attention.config = local
    for name, module in model.named_modules():
        if type(module) is nn.Linear:
            module.out_features, module.in_features = module.weight.shape
            if rank > 0 and module.bias is not None and name.rpartition(".")[2] in ROW_PARALLEL:
                module.__class__ = BiasOnRankZero
        elif rank > 0 and isinstance(module, QuantizedLinear) and name.rpartition(".")[2] in ROW_PARALLEL:
            module._parameters["bias"] = None  # added once, on rank 0
    for module in model.modules():
        if type(module).__name__.endswith("TopKRouter"):
            module.register_forward_hook(partial(_share_of_router_loss, ranks=tp))
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    embedding.first = split(shape.vocab_size, tp, rank)[0]
    embedding.num_embeddings = embedding.weight.shape[0]
    if embedding.padding_idx is not None:
        padding = embedding.padding_idx - embedding.first
        embedding.padding_idx = padding if 0 <= padding < embedding.num_embeddings else None
    embedding.__class__ = type("Vocabulary" + type(embedding).__name__, (VocabularyEmbedding, type(embedding)), {})
    head.__class__ = VocabularyHead
    head.first, head.candidates = embedding.first, None
    head.vocabulary = shape.vocab_size
    head.width = -(-shape.vocab_size // tp)
