"""Small random models of every supported family, and the oracle that follows the recurrence by hand."""

import copy

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from ladder_residual.core.config import Wiring
from ladder_residual.models.chunks import local_part
from ladder_residual.models.families import FAMILIES, family_of
from ladder_residual.models.hf import rewire
from ladder_residual.models.hf_config import wiring_of
from ladder_residual.models.loading import place_parameters, set_reducers
from ladder_residual.models.presets import ModelShape
from ladder_residual.models.sharding import check_divides, shard_of

LAYERS = 4
VOCAB = 131  # a prime: no number of ranks divides it

_COMMON = dict(
    vocab_size=VOCAB,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=LAYERS,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
_EXTRA = {
    "llama": dict(attention_bias=True, mlp_bias=True),  # biases of row-parallel projections are added once
    "qwen3": dict(head_dim=16),
    "gemma": dict(head_dim=16),
    "gemma2": dict(head_dim=16, query_pre_attn_scalar=16, sliding_window=8),
    "gemma3_text": dict(head_dim=16, query_pre_attn_scalar=16, sliding_window=8),
    "granite": dict(residual_multiplier=0.3, embedding_multiplier=2.0, logits_scaling=3.0),
    "starcoder2": dict(use_bias=True),
    "mixtral": dict(num_local_experts=4, num_experts_per_tok=2),
    "qwen2_moe": dict(
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=48,
        decoder_sparse_step=1,
    ),
    "qwen3_moe": dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, head_dim=16, decoder_sparse_step=1),
    "gpt_neox": dict(use_parallel_residual=False, num_key_value_heads=4),
    "phi3": dict(original_max_position_embeddings=128),
}
FAMILY_NAMES = sorted(FAMILIES)


def tiny_config(model_type, **overrides):
    return AutoConfig.for_model(model_type, **_COMMON | _EXTRA.get(model_type, {}) | overrides)


def tiny_model(model_type="llama", seed=0, **overrides):
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(tiny_config(model_type, **overrides), dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Every parameter matters: norms and biases that stay at one and zero would hide a wrong or missing one.
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
            elif "embed" not in name:
                parameter.mul_(4)
    return model.eval()


def shard_model(model, rank, *, reducer=None, uneven=False):
    """Reduce a whole model in memory to this rank's shards, in place: ``load_model`` without files."""
    config = model.config.to_dict()
    family = family_of(config)
    if config["model_type"] != family.ladder_type:
        rewire(model, "standard")
    shape = ModelShape.from_hf(config)
    check_divides(shape, family, rank.size, uneven)
    wiring_of(model.config).check_tp(rank.size)
    whole = dict(model.named_parameters())

    def read(name, shape, spec):
        tensor = whole[name].detach()
        return tensor.clone() if spec is None else local_part(tensor, spec)

    place_parameters(model, read, shape, family, rank)
    set_reducers(model, reducer or rank.reducer())
    return model


def random_ids(batch=3, length=9, seed=1):
    return torch.randint(3, VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


def padded_inputs(batch=3, length=9):
    """Prompts of unequal lengths, padded on the left."""
    ids, mask = random_ids(batch, length), torch.ones(batch, length, dtype=torch.long)
    mask[0, :3] = 0
    mask[1, :1] = 0
    return {"input_ids": ids.masked_fill(mask == 0, 0), "attention_mask": mask}


def relative(found, expected):
    return ((found - expected).norm() / expected.norm().clamp_min(1e-8)).item()


def layer_inputs(model, **inputs):
    """The arguments transformers gives each of its decoder layers: masks, positions, rotary tables."""
    seen = []
    hooks = [
        layer.register_forward_pre_hook(lambda m, args, kwargs: seen.append((args[0], dict(kwargs))), with_kwargs=True)
        for layer in model.base_model.layers
    ]
    with torch.no_grad():
        model(**inputs, use_cache=False)
    for hook in hooks:
        hook.remove()
    return seen[0][0], [kwargs for _, kwargs in seen]


def modules_of(layer, family, kwargs):
    """h of attention and h of the MLP, each with what the family puts before and after it."""

    def part(name):
        return getattr(layer, name) if name else (lambda x: x)

    scale = getattr(layer, family.multiplier) if family.multiplier else 1.0

    def attention(x):
        return part(family.attention_after)(
            getattr(layer, family.attention)(part(family.attention_norm)(x), **kwargs)[0] * scale
        )

    def mlp(x):
        return part(family.mlp_after)(getattr(layer, family.mlp)(part(family.mlp_norm)(x)) * scale)

    return attention, mlp


def oracle_logits(model, ladder_layers=(), **inputs):
    """x_i = x_{i-1} + h_i(x_{i-1}) or, in the named layers, x_{i-1} + h_i(x_{i-2}); x_{-1} = x_0. Plain model, no cache."""
    family = FAMILIES[model.config.model_type]
    embedding, kwargs = layer_inputs(model, **inputs)
    xs = [embedding]
    with torch.no_grad():
        for index, layer in enumerate(model.base_model.layers):
            for h in modules_of(layer, family, kwargs[index]):
                read = xs[max(len(xs) - 2, 0)] if index in ladder_layers else xs[-1]
                xs.append(xs[-1] + h(read))
        norm = getattr(model.base_model, "norm", None) or model.base_model.final_layer_norm
        return head_logits(model, norm(xs[-1]))


def head_logits(model, hidden):
    logits = model.get_output_embeddings()(hidden)
    logits = logits / getattr(model.config, "logits_scaling", 1.0)
    softcap = getattr(model.config, "final_logit_softcapping", None)
    return logits if not softcap else softcap * torch.tanh(logits / softcap)


def clone(model):
    return copy.deepcopy(model)


def simulated(model, spec, ranks, inputs):
    """``ranks`` streams in one process, differentiable. A rank's partial is the whole module with the inputs of its output
    projection zeroed where they belong to other ranks: nothing of the sharding code is used."""
    wiring, family, config = Wiring.parse(spec, LAYERS), FAMILIES["llama"], model.config
    _, kwargs = layer_inputs(model, **inputs)
    x = model.get_input_embeddings()(inputs["input_ids"])

    def partial(layer, which, rank, stream):
        output = layer.self_attn.o_proj if which == 0 else layer.mlp.down_proj
        columns = config.num_attention_heads * config.head_dim if which == 0 else config.intermediate_size
        keep = torch.zeros(columns)
        keep[rank * columns // ranks : (rank + 1) * columns // ranks] = 1
        hooks = [
            output.register_forward_pre_hook(lambda module, args: (args[0] * keep,)),
            output.register_forward_hook(lambda module, args, out: out if rank == 0 else out - module.bias),
        ]
        try:
            return modules_of(layer, family, kwargs[0])[which](stream)
        finally:
            for hook in hooks:
                hook.remove()

    streams = [x] * ranks
    late = []  # delayed: (module number, partials of all ranks) still missing from the other ranks' streams

    def deliver(before):
        while late and late[0][0] < before:
            _, partials = late.pop(0)
            total = sum(partials)
            streams[:] = [s + total - p for s, p in zip(streams, partials, strict=True)]

    diverged, number = False, 0
    for index, layer in enumerate(model.base_model.layers):
        for which in (0, 1):
            number += 1
            kind = wiring.kind_of(index)
            if kind == "standard":
                deliver(number)
                if diverged:
                    streams, diverged = [sum(streams) / ranks] * ranks, False
            elif kind == "delayed":
                deliver(number - wiring.step)
            partials = [partial(layer, which, rank, streams[rank]) for rank in range(ranks)]
            if kind == "standard":
                streams = [s + sum(partials) for s in streams]
            elif kind == "desync" and number % wiring.step == 0:
                streams, diverged = [sum(partials) + sum(streams) / ranks] * ranks, False
            else:
                streams = [s + p for s, p in zip(streams, partials, strict=True)]
                diverged = kind == "desync"
                if kind == "delayed":
                    late.append((number, partials))
    deliver(number + 1)
    if diverged:
        streams = [sum(streams) / ranks] * ranks
    # Each rank computes its own rows of the vocabulary from its own stream (they differ without communication).
    rows = []
    for rank in range(ranks):
        logits = head_logits(model, model.model.norm(streams[rank]))
        shape = ModelShape.from_hf(config.to_dict())
        start, stop = shard_of("lm_head.weight", (config.vocab_size,), shape, ranks, rank).ranges[0]
        rows.append(logits[..., start:stop])
    return torch.cat(rows, -1)
