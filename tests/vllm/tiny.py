"""Tiny checkpoints for vLLM's CPU kernels (which want heads of 32), and the tokens the package itself generates from them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from ladder_residual.models.convert import convert
from ladder_residual.models.loading import load_model

LAYERS, VOCABULARY, NEW_TOKENS = 4, 512, 24
EXTRA: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "decoder_sparse_step": 1},
    "qwen2": {"hidden_size": 128},  # vLLM derives its head size from it
    "qwen2_moe": {
        "hidden_size": 128,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 128,
        "shared_expert_intermediate_size": 64,
    },
    "gemma": {"tie_word_embeddings": True},
    # Windows shorter than the prompts, on every second layer.
    "gemma2": {"tie_word_embeddings": True, "sliding_window": 16, "query_pre_attn_scalar": 32},
    "gemma3_text": {
        "tie_word_embeddings": True,
        "sliding_window": 16,
        "sliding_window_pattern": 2,
        "query_pre_attn_scalar": 32,
    },
    "granite": {"residual_multiplier": 0.4, "embedding_multiplier": 3.0, "attention_multiplier": 0.2, "logits_scaling": 0.5},
    "phi3": {"hidden_size": 128},
    "smollm3": {"no_rope_layer_interval": 2},
}
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}"


def plain(directory: Path, family: str = "llama", layers: int = LAYERS, **fields: Any) -> Path:
    """A standard checkpoint with random weights, large enough that no two tokens are nearly equally likely."""
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 512,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "tie_word_embeddings": False,
    }
    config = AutoConfig.for_model(family, **(sizes | EXTRA.get(family, {}) | fields))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0, 0.15)
        elif name.endswith("bias"):
            parameter.data.normal_(0, 0.5)
        else:
            parameter.data += 0.2 * torch.randn(parameter.shape)  # no two norms are alike
    model.save_pretrained(directory)
    return directory


def rewired(folder: Path, wiring: str, family: str = "llama", **fields: Any) -> Path:
    """As `ladder convert` writes it."""
    name = "-".join([family, *map(str, fields)])
    source = folder / name
    if not source.exists():
        plain(source, family, **fields)
    target = folder / f"{name}-{wiring.replace(':', '_').replace(',', '_')}"
    if not target.exists():
        convert(source, target, wiring)
    return target


def with_tokenizer(directory: Path) -> Path:
    """Add the demo's tokenizer, and a chat template, to a checkpoint."""
    demo = resources.files("ladder_residual").joinpath("assets", "demo")
    (directory / "tokenizer.json").write_text(demo.joinpath("tokenizer.json").read_text())
    fields = json.loads(demo.joinpath("tokenizer_config.json").read_text())
    (directory / "tokenizer_config.json").write_text(json.dumps(fields | {"chat_template": CHAT_TEMPLATE}))
    return directory


def prompts(*lengths: int, shared: int = 0) -> list[list[int]]:
    """Random token ids; the first ``shared`` of each prompt are the same."""
    generator = torch.Generator().manual_seed(1)
    common = torch.randint(3, VOCABULARY, (shared,), generator=generator).tolist()
    return [common + torch.randint(3, VOCABULARY, (length - shared,), generator=generator).tolist() for length in lengths]


@torch.inference_mode()
def greedy(model: PreTrainedModel | Path, inputs: list[list[int]], new_tokens: int = NEW_TOKENS) -> list[list[int]]:
    """The package's own greedy tokens, one prompt at a time."""
    if isinstance(model, Path):
        model = load_model(model)
    options = {"max_new_tokens": new_tokens, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    return [model.generate(torch.tensor([ids]), **options)[0, len(ids) :].tolist() for ids in inputs]


def edited(directory: Path, checkpoint: Path, edit: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    """A copy with other weights."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(checkpoint, directory)
    tensors = load_file(checkpoint / "model.safetensors")
    edit(tensors)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


LOUD = 7  # the token that overflows


def overflowing(directory: Path, checkpoint: Path) -> Path:
    """After the token ``LOUD`` an MLP multiplies 800 by 800, which float16 cannot hold. No other token can tell."""

    def edit(tensors: dict[str, torch.Tensor]) -> None:
        embedding = tensors["model.embed_tokens.weight"]
        embedding[:, 0], embedding[LOUD], embedding[LOUD, 0] = 0, 0, 1000  # a channel of its own
        for name, tensor in tensors.items():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                tensor[0] = 0
        for name in ("gate_proj", "up_proj"):
            tensor = tensors[f"model.layers.1.mlp.{name}.weight"]
            tensor[0], tensor[0, 0] = 0, 100

    return edited(directory, checkpoint, edit)


LORA_RANK, LORA_ALPHA = 8, 16
LORA_MODULES = ("q_proj", "o_proj", "down_proj")  # both row-parallel ones: their all-reduces are what we defer


def lora_adapter(directory: Path, checkpoint: Path) -> PreTrainedModel:
    """An adapter in peft's format, and the model with it merged."""
    from safetensors.torch import save_file

    model = load_model(checkpoint)
    generator = torch.Generator().manual_seed(2)
    tensors = {}
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in LORA_MODULES:
            rows, columns = module.weight.shape
            a = torch.randn(LORA_RANK, columns, generator=generator) * 0.1
            b = torch.randn(rows, LORA_RANK, generator=generator) * 0.1
            tensors |= {f"base_model.model.{name}.lora_A.weight": a, f"base_model.model.{name}.lora_B.weight": b}
            module.weight.data += LORA_ALPHA / LORA_RANK * b @ a
    directory.mkdir()
    save_file(tensors, directory / "adapter_model.safetensors")
    fields = {"peft_type": "LORA", "r": LORA_RANK, "lora_alpha": LORA_ALPHA, "bias": "none"}
    fields["target_modules"] = list(LORA_MODULES)
    (directory / "adapter_config.json").write_text(json.dumps(fields))
    return model


def quantised(directory: Path, checkpoint: Path) -> PreTrainedModel:
    """Weights in int8, a scale per row (compressed-tensors, activations quantised per token), and the model that computes so."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(checkpoint / "model.safetensors")
    for name in [name for name in tensors if "_proj.weight" in name]:
        scale = tensors[name].abs().amax(1, keepdim=True) / 127
        tensors[name] = (tensors[name] / scale).round().clamp(-128, 127).to(torch.int8)
        tensors[f"{name}_scale"] = scale
    directory.mkdir()
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((checkpoint / "config.json").read_text())
    eight_bits = {"num_bits": 8, "type": "int", "symmetric": True}
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": eight_bits | {"strategy": "channel", "dynamic": False},
                "input_activations": eight_bits | {"strategy": "token", "dynamic": True},
            }
        },
    }
    (directory / "config.json").write_text(json.dumps(config))

    model = load_model(checkpoint)
    for name, module in model.named_modules():
        if name.endswith("_proj"):
            module.weight.data = tensors[f"{name}.weight"].float() * tensors[f"{name}.weight_scale"]
            module.register_forward_pre_hook(_quantise_input)
    return model


def quantised_by_convert(directory: Path, checkpoint: Path) -> PreTrainedModel:
    """`ladder convert --quantize fp8`, and the model that computes so: activations in fp8 too, a scale per token."""
    convert(checkpoint, directory, quantize="fp8")
    return with_fp8_activations(load_model(directory))


def with_fp8_activations(model: PreTrainedModel) -> PreTrainedModel:
    for name, module in model.named_modules():
        if name.endswith("_proj"):
            module.register_forward_pre_hook(_input_in_fp8)
    return model


def _input_in_fp8(module: torch.nn.Module, arguments: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
    (x,) = arguments
    scale = x.abs().amax(-1, keepdim=True) / 448
    return ((x / scale).to(torch.float8_e4m3fn).float() * scale,)


def _quantise_input(module: torch.nn.Module, arguments: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
    (x,) = arguments
    scale = x.abs().amax(-1, keepdim=True) / 127
    return ((x / scale).round() * scale,)
