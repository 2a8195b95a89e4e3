"""FLOPs of a training step and what share of the device's peak they are. No torch."""

from __future__ import annotations

from ..models.presets import ModelShape

# Dense bf16 TFLOP/s by what the driver calls the device. The H200's data sheet says 989.
PEAK_TFLOPS = {
    "H200": 990.0,
    "H100": 990.0,
    "GH200": 990.0,
    "B200": 2250.0,
    "A100": 312.0,
    "L40S": 362.0,
    "L4": 121.0,
    "A10": 125.0,
}


def flops_per_token(shape: ModelShape, sequence: int) -> float:
    """Forward and backward, as needed and not as done: no credit for masked attention or recomputed activations.

    Six per parameter of every GEMM (the input embedding is a lookup), and attention's scores and values over the half of the
    square that a causal mask leaves.
    """
    head = shape.hidden_size * shape.vocab_size
    gemms = shape.num_layers * (shape.attention_parameters + shape.mlp_parameters) + head
    attention = shape.num_layers * 4 * shape.num_heads * shape.head_dim * (sequence + 1) / 2
    return 6.0 * gemms + 3.0 * attention


def peak_tflops(device_name: str) -> float | None:
    """None for a device that is not in the table (CPUs): then there is no MFU."""
    names = sorted(PEAK_TFLOPS, key=len, reverse=True)
    return next((PEAK_TFLOPS[name] for name in names if name.lower() in device_name.lower()), None)
