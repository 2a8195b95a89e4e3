"""A peer of the CUDA engine: transformers with a static cache and compile, holding the very same weights."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

from ladder_residual.bench.timing import time_calls
from ladder_residual.engine.cuda.timing import time_on_device
from ladder_residual.engine.spec import EngineSpec
from ladder_residual.engine.weights import RankWeights
from ladder_residual.models.loading import restore_buffers


def transformers_model(spec: EngineSpec, weights: RankWeights) -> Any:
    """Views of the engine's stacked matrices under transformers' names: nothing is copied. One rank, Llama."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = spec.shape
    if shape.family.removeprefix("ladder_") != "llama" or spec.qkv_bias or spec.head_norm:
        raise ValueError(f"transformers is compared on Llama, not on {shape.family}")
    config = LlamaConfig(
        hidden_size=shape.hidden_size, intermediate_size=shape.intermediate_size, num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads, num_key_value_heads=shape.num_kv_heads, head_dim=shape.head_dim,
        vocab_size=shape.vocab_size, max_position_embeddings=131072, tie_word_embeddings=shape.tied_embeddings,
        rms_norm_eps=spec.norm_eps, dtype=weights.dtype, pad_token_id=0, eos_token_id=None,
        rope_parameters={"rope_type": "default", "rope_theta": spec.rope_theta, **spec.rope_scaling},
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model.load_state_dict(_by_name(spec, weights), strict=False, assign=True)
    if shape.tied_embeddings:
        model.tie_weights()
    restore_buffers(model, weights.device)
    missing = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    assert not missing, f"no weights for {missing[:3]}"
    return model.eval()


def _by_name(spec: EngineSpec, weights: RankWeights) -> dict[str, Tensor]:
    shape = spec.shape
    queries, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    named = {"model.embed_tokens.weight": weights.embedding, "model.norm.weight": weights.final_norm}
    if not shape.tied_embeddings:
        named["lm_head.weight"] = weights.head
    for index, layer in enumerate(weights.layers):
        at = f"model.layers.{index}."
        parts = dict(zip(("q_proj", "k_proj", "v_proj"), layer.qkv.split([queries, kv, kv]), strict=True))
        named |= {f"{at}self_attn.{name}.weight": part for name, part in (parts | {"o_proj": layer.output}).items()}
        gate, up = layer.gate_up.chunk(2)
        named |= {f"{at}mlp.gate_proj.weight": gate, f"{at}mlp.up_proj.weight": up, f"{at}mlp.down_proj.weight": layer.down}
        named |= {
            f"{at}input_layernorm.weight": layer.input_norm,
            f"{at}post_attention_layernorm.weight": layer.post_attention_norm,
        }
    return named


@torch.no_grad()
def transformers_steps(
    model: Any, *, batch: int, context: int, max_context: int, repeats: int
) -> tuple[list[float], float]:  # fmt: skip
    """Milliseconds of decode steps as ``generate`` compiles them (forward under reduce-overhead, static cache), and the seconds
    until they are fast."""
    from transformers import StaticCache

    warming = 5
    first = context - repeats // 2 - warming
    cache = StaticCache(config=model.config, max_cache_len=max_context)
    forward = torch.compile(model.forward, mode="reduce-overhead", fullgraph=True)
    began = time.perf_counter()
    model(_prompts(model, batch, first), past_key_values=cache, use_cache=True, logits_to_keep=1)
    position = torch.tensor([[first]], device=model.device)
    token = _prompts(model, batch, 1)

    def step() -> None:
        torch.compiler.cudagraph_mark_step_begin()
        forward(token, past_key_values=cache, position_ids=position, use_cache=True)
        position.add_(1)  # the cache counts for itself

    for _ in range(warming):
        step()
    torch.cuda.synchronize()
    return time_on_device(step, repeats), time.perf_counter() - began


@torch.no_grad()
def transformers_prefill(model: Any, *, batch: int, prompt: int, repeats: int) -> list[float]:
    """Milliseconds of reading a prompt, as ``generate`` reads it."""
    tokens = _prompts(model, batch, prompt)
    return time_calls(lambda: model(tokens, use_cache=True, logits_to_keep=1), repeats)


@torch.no_grad()
def transformers_generate(model: Any, *, batch: int, prompt: int, new: int, repeats: int) -> list[float]:
    """Milliseconds of a whole greedy ``generate``, which compiles its steps on the first call."""
    tokens = _prompts(model, batch, prompt)
    lengths = {"max_new_tokens": new, "min_new_tokens": new, "cache_implementation": "static", "do_sample": False}
    return time_calls(lambda: model.generate(tokens, attention_mask=torch.ones_like(tokens), **lengths), repeats)


def _prompts(model: Any, batch: int, length: int) -> Tensor:
    generator = torch.Generator(device=model.device).manual_seed(0)
    return torch.randint(0, model.config.vocab_size, (batch, length), device=model.device, generator=generator)
