"""Serve rewired checkpoints with vLLM: ``pip install ladder-residual`` beside vLLM, then ``vllm serve DIRECTORY``.

vLLM calls ``register`` in each of its processes (entry point group ``vllm.general_plugins``). It tells vLLM names
and has it ask ``routing.py`` about every config; the models, in ``models.py``, are imported when a checkpoint asks for one.
"""

from __future__ import annotations

import importlib.util

_spec = importlib.util.find_spec("vllm")
if _spec is None or _spec.origin is None:  # a folder that happens to be called vllm has no origin
    raise ImportError(
        "ladder_residual.vllm_plugin needs vLLM, which is not installed here: pip install vllm (CPU: see docs/serving.md)"
    )

# Families whose vLLM model this plugin rewires, and why the others of families.py are not among them.
SERVED_FAMILIES = (
    *("llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen2_moe", "qwen3_moe"),
    *("gemma", "gemma2", "gemma3_text", "granite", "phi3", "smollm3"),
)
_LAYERS = "vLLM runs this family with the layers of transformers{since}, which the plugin does not rewire"
UNSERVED = dict.fromkeys(("olmo", "olmo2", "starcoder2"), _LAYERS.format(since=""))
UNSERVED |= {"olmo3": _LAYERS.format(since=" since 0.29"), "gpt_neox": _LAYERS.format(since=" since 0.32")}


def register() -> None:
    """Called by vLLM, possibly more than once. (Importing the package has registered the configs with transformers.)"""
    from vllm import ModelRegistry

    from ..models.families import FAMILIES
    from ..models.hf_config import class_name
    from .kv_stores import name_wirings_in_kv_stores
    from .nonfinite import fail_requests_with_nans
    from .routing import route_configs

    known = ModelRegistry.get_supported_archs()
    for model_type in FAMILIES:
        architecture = class_name(model_type, "ForCausalLM")
        if architecture not in known:
            # A family that is not served gets a class too: it says so, where vLLM would look for a fallback that ignores the wiring.
            target = architecture if model_type in SERVED_FAMILIES else "UnservedForCausalLM"
            ModelRegistry.register_model(architecture, f"{__name__}.models:{target}")
    route_configs()
    name_wirings_in_kv_stores()
    fail_requests_with_nans()
