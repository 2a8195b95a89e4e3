"""Loads this checkpoint through the package `ladder-residual`, which knows its wiring."""

import sys
import warnings

try:
    from ladder_residual.models import hf as _model
except ImportError as error:
    raise ImportError(
        "this checkpoint has a rewired residual stream that only the package ladder-residual computes: pip install ladder-residual"
    ) from error

if "vllm" in sys.modules and "ladder_residual.vllm_plugin" not in sys.modules:
    # vLLM then tries transformers' own model and fails with a message that does not name the cause.
    warnings.warn(
        "vLLM serves this checkpoint only through its plugin ladder_residual, which is not loaded here: is VLLM_PLUGINS set?",
        stacklevel=2,
    )


def __getattr__(name):
    return getattr(_model, name)
