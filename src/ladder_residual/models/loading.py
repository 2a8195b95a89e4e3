"""From a checkpoint directory to one rank's model: each rank reads only its slices.

The family's model is built without memory (meta device), its modules are told their share, then every parameter is read and
placed. With one rank the same path loads the whole model. ``shard_model`` does the same to a model that is in memory.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, PreTrainedModel

from .candidates import Candidates, decisive_logits
from .checkpoint import Checkpoint, resolve, sources_of
from .config import Wiring
from .families import Family, check_wiring, family_of
from .generation_settings import generation_config
from .hf_config import ladder_config_class, wiring_of
from .launch import is_out_of_memory
from .memory import require
from .model import rewire, set_reducer
from .parallel import World
from .presets import ModelShape
from .reduce import Reducer
from .sharding import ROW_PARALLEL, Cut, RankHeads, check_divides, cut_of, rank_heads, split

MAX_BUFFER_ELEMENTS = 1 << 26  # far above any model's rotary tables
DTYPES = {
    "float32": torch.float32,
    "fp32": torch.float32,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float16": torch.float16,
    "fp16": torch.float16,
}


class VocabularyEmbedding(nn.Embedding):
    """Mixed in before the embedding's own class: this rank's rows of the table; the others' tokens come with the sum."""

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


class BiasElsewhere(nn.Linear):
    """A row-parallel projection on a rank other than 0: its bias belongs to the sum and is added once, there."""

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
    world: World | None = None,
    *,
    wiring: str | None = None,
    dtype: str = "auto",
    reducer: Reducer | None = None,
    uneven: bool = False,
    attention: str | None = None,
) -> PreTrainedModel:
    """This rank's share of the checkpoint at ``source`` (directory or hub id), ready for inference or training.

    ``wiring`` overrides the checkpoint's own; ``reducer`` (default: asynchronous) sums over ranks; ``uneven`` allows ranks with
    unequal numbers of heads.
    """
    world = world or World()
    checkpoint = Checkpoint(resolve(source))
    family = family_of(checkpoint.config)
    config = model_config(checkpoint, family, wiring)
    shape = ModelShape.from_hf(config.to_dict())
    check_divides(shape, family, world.size, uneven)
    wiring_of(config).check_tp(world.size)
    if dtype != "auto" and dtype not in DTYPES:
        raise ValueError(f"unknown dtype {dtype!r}; choose auto, {', '.join(DTYPES)}")
    target = DTYPES[dtype] if dtype != "auto" else stored_dtype(config, checkpoint)
    options = {"attn_implementation": attention} if attention else {}
    world.check_software()
    world.check_same("the config or wiring", json.dumps([config.to_dict(), str(target)], sort_keys=True, default=str))
    if world.size > 1:
        world.check_same("the checkpoint", checkpoint.digest())
    file = checkpoint.directory / "config.json"
    with built_from(file), torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=target, **options)
    _check_shapes(model, checkpoint)
    check_buffers(model)
    check_weights_fit(model, world)
    with built_from(file):
        restore_buffers(model, world.device)

    def read(name: str, shape: tuple[int, ...], cut: Cut | None) -> Tensor:
        return _read_parameter(checkpoint, name, shape, cut).to(target)

    place_parameters(model, read, shape, family, world)
    checkpoint.check_all_used()
    checkpoint.close()
    if found := generation_config(checkpoint.directory, shape.vocab_size):
        model.generation_config = found
    set_reducers(model, reducer or world.reducer())
    return model.eval()


def check_weights_fit(model: PreTrainedModel, world: World) -> None:
    """Before the first weight is read: a GPU that is too small says so in numbers."""
    if world.device.type != "cuda":
        return  # a host swaps, and is_out_of_memory tells what the kernel did about it
    need = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters()) / world.size
    require(need, world.device, "a rank's weights", "use more ranks (--tp) or a dtype of fewer bytes (--dtype bfloat16)")


def shard_model(
    model: PreTrainedModel, world: World, *, reducer: Reducer | None = None, uneven: bool = False
) -> PreTrainedModel:
    """Cut a whole model in memory down to this rank's share, in place (tests, small models)."""
    config = model.config.to_dict()
    family = family_of(config)
    if config["model_type"] != family.ladder_type:
        rewire(model, "standard")
    shape = ModelShape.from_hf(config)
    check_divides(shape, family, world.size, uneven)
    wiring_of(model.config).check_tp(world.size)
    whole = dict(model.named_parameters())

    def read(name: str, shape: tuple[int, ...], cut: Cut | None) -> Tensor:
        tensor = whole[name].detach()
        if cut is None:
            return tensor.clone()
        return torch.cat([tensor.narrow(cut.dim, start, stop - start) for start, stop in cut.ranges], cut.dim)

    place_parameters(model, read, shape, family, world)
    set_reducers(model, reducer or world.reducer())
    return model


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
    """Let every layer, the embedding and the head sum through ``reducer``."""
    set_reducer(model, reducer)
    for module in model.modules():
        if isinstance(module, VocabularyEmbedding | VocabularyHead):
            module.reducer = reducer


def model_config(checkpoint: Checkpoint, family: Family, wiring: str | None) -> Any:
    fields = {key: value for key, value in checkpoint.config.items() if key not in ("model_type", "auto_map")}
    layers = fields.get("num_hidden_layers")
    if not isinstance(layers, int) or isinstance(layers, bool):
        raise ValueError(
            f"{checkpoint.directory / 'config.json'}: num_hidden_layers is {layers!r:.40}, expected a whole number"
        )
    stored = Wiring.from_config(fields, layers)
    checkpoint.check_layers(layers)
    if wiring is not None:
        chosen = Wiring.parse(wiring, layers)
        check_wiring(family, chosen)
        stored.check_same_weights(chosen)
        fields["wiring"] = chosen.spec
    try:
        return ladder_config_class(family.model_type).from_dict(fields)
    except Exception as error:  # transformers validates fields with several exception types
        raise ValueError(
            f"{checkpoint.directory / 'config.json'} is not a valid {family.model_type} config: {error}"
        ) from error


def stored_dtype(config: Any, checkpoint: Checkpoint) -> torch.dtype:
    """As the config says, or else as the weights are."""
    if isinstance(config.dtype, torch.dtype):
        return config.dtype
    return {"BF16": torch.bfloat16, "F16": torch.float16}.get(checkpoint.dtype(), torch.float32)


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


def _check_shapes(model: PreTrainedModel, checkpoint: Checkpoint) -> None:
    """Before anything gets memory: what is stored under a parameter's own name has the shape the config calls for."""
    for name, parameter in model.named_parameters():
        stored = next((own[0] for own in sources_of(name) if own[0] in checkpoint), None)
        if stored is not None:
            _check_shape(checkpoint, stored, tuple(parameter.shape))


def _read_parameter(checkpoint: Checkpoint, name: str, shape: tuple[int, ...], cut: Cut | None) -> Tensor:
    for templates in sources_of(name):
        if "{}" not in templates[0]:
            if templates[0] in checkpoint:
                _check_shape(checkpoint, templates[0], shape)
                return checkpoint.read(templates[0], cut)
        elif templates[0].format(0) in checkpoint:
            return _read_experts(checkpoint, templates, shape, cut)
    raise ValueError(f"{checkpoint.directory} has no tensor {name}, which its config.json calls for")


def _read_experts(checkpoint: Checkpoint, templates: list[str], shape: tuple[int, ...], cut: Cut | None) -> Tensor:
    """Stack ``[expert, ...]`` from one matrix per expert (and per gate / up), cutting each as it is read."""
    each = (shape[1] // len(templates), shape[2])
    experts = []
    for expert in range(shape[0]):
        pieces = []
        for template in templates:
            name = template.format(expert)
            if name not in checkpoint:
                raise ValueError(f"{checkpoint.directory} has no tensor {name}: expert {expert} of {shape[0]} is missing")
            _check_shape(checkpoint, name, each)
            # The stack is cut along [expert, rows, columns]; a single matrix lacks the first dim. Gate and up keep equal ranges.
            own = Cut(cut.dim - 1, cut.ranges[:1]) if cut else None
            pieces.append(checkpoint.read(name, own))
        experts.append(torch.cat(pieces) if len(pieces) > 1 else pieces[0])
    return torch.stack(experts)


def _check_shape(checkpoint: Checkpoint, name: str, expected: tuple[int, ...]) -> None:
    found = checkpoint.shape(name)
    if found != expected:
        raise ValueError(
            f"{checkpoint.directory}: {name} has shape {list(found)}, but config.json calls for {list(expected)}; one of them is wrong"
        )


def place_parameters(
    model: Any,
    read: Callable[[str, tuple[int, ...], Cut | None], Tensor],
    shape: ModelShape,
    family: Family,
    world: World,
) -> None:
    cuts: dict[str, Cut | None] = {}
    tied = getattr(model.config, "tie_word_embeddings", False)
    head_weight = f"{family.head}.weight"
    for name, parameter in list(model.named_parameters()):
        if tied and name == head_weight:
            continue
        whole = tuple(parameter.shape)
        cut = cut_of(name, whole, shape, world.size, world.rank) if world.size > 1 else None
        tensor = read(name, whole, cut).to(world.device)
        module_name, _, leaf = name.rpartition(".")
        module = model.get_submodule(module_name)
        module._parameters[leaf] = nn.Parameter(tensor, requires_grad=parameter.requires_grad)
        cuts[name] = cut
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if tied:
        head.weight = embedding.weight
    if world.size > 1:
        _tell_modules_their_share(model, shape, family, world)
    model.tensor_parallel_cuts = cuts


def _share_of_router_loss(module: nn.Module, inputs: Any, output: Any, *, ranks: int) -> Any:
    """Router logits feed only the balancing loss, which transformers computes alike on every rank: each rank takes its share of
    that gradient, because shares are what ``finish_gradients`` sums."""
    logits, *rest = output
    return (logits / ranks + (logits * (1 - 1 / ranks)).detach(), *rest)


def _tell_modules_their_share(model: Any, shape: ModelShape, family: Family, world: World) -> None:
    heads = rank_heads(shape, world.size, world.rank)
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
            if world.rank > 0 and module.bias is not None and name.rpartition(".")[2] in ROW_PARALLEL:
                module.__class__ = BiasElsewhere
    for module in model.modules():
        if type(module).__name__.endswith("TopKRouter"):
            module.register_forward_hook(partial(_share_of_router_loss, ranks=world.size))
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    embedding.first = split(shape.vocab_size, world.size, world.rank)[0]
    embedding.num_embeddings = embedding.weight.shape[0]
    if embedding.padding_idx is not None:
        padding = embedding.padding_idx - embedding.first
        embedding.padding_idx = padding if 0 <= padding < embedding.num_embeddings else None
    embedding.__class__ = type("Vocabulary" + type(embedding).__name__, (VocabularyEmbedding, type(embedding)), {})
    head.__class__ = VocabularyHead
    head.first, head.candidates = embedding.first, None
    head.vocabulary = shape.vocab_size
    head.width = -(-shape.vocab_size // world.size)
