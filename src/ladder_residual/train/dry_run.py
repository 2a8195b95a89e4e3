"""What a recipe will need, before anyone reserves a cluster: steps, tokens, memory per rank, time. No torch, no GPU.

The time is an estimate: GEMMs at the rate the device achieves on them, everything else in a step (norms, attention's softmax,
optimizer, launches) as a flat share, and communication where nothing can hide it. It says what dominates and whether a recipe fits;
it does not replace a run of a few steps.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ..core.config import Wiring
from ..core.dependencies import dependencies
from ..links.link import Link
from ..models.families import FAMILIES
from ..models.presets import ModelShape
from ..models.sharding import check_divides
from ..plan.cost import RUNTIME_BYTES, RankShape
from ..plan.hardware import shipped
from .layout import rows_per_rank
from .recipe import Recipe
from .speed import flops_per_token

# What GEMMs alone would take, as a share of a step's compute time: measured MFU (results/train/speed.json) over the rate of bare
# GEMMs on the same device.
GEMM_SHARE = 0.6
LOW = 2  # bytes of bf16
FULL = 4  # bytes of float32


class Seconds(NamedTuple):
    """Of one step of one rank."""

    compute: float
    tensor: float  # all-reduces of tensor parallelism that nothing hides
    tensor_hidden: float
    contention: float  # what compute loses while hidden all-reduces run beside it
    data: float  # gathering weights and spreading gradients, where compute does not hide it


def estimate(
    recipe: Recipe, *, ranks: int | None = None, device: str = "h100", link: str = "nccl", network: str = "ib-2-nodes"
) -> dict[str, Any]:
    """``ranks``: where the recipe leaves dp open. ``link`` joins tensor-parallel ranks, ``network`` the copies of the model."""
    tp = recipe.parallel.tp
    dp = recipe.parallel.dp or max(1, (ranks or tp) // tp)
    if ranks is not None and ranks != dp * tp:
        raise ValueError(f"{ranks} ranks do not fit parallel.dp {dp} x parallel.tp {tp}")
    shape = recipe.model.shape()
    check_divides(shape, FAMILIES[shape.family], tp)
    rows, micro = rows_per_rank(recipe.batch.rows, dp, recipe.batch.micro_rows)
    hardware = shipped()
    chosen = hardware.device(device)
    seconds = _seconds(recipe, shape, dp, rows, micro, chosen, hardware.link(link, chosen), hardware.link(network, chosen))
    step = seconds.compute + seconds.tensor + seconds.contention + seconds.data
    memory = _memory(recipe, shape, dp, micro, accumulated=rows > micro)
    flops = flops_per_token(shape, recipe.data.sequence) * recipe.tokens_per_step
    return {
        "name": recipe.name,
        "wiring": recipe.wiring.spec,
        "parameters": shape.parameters,
        "ranks": dp * tp,
        "dp": dp,
        "tp": tp,
        "rows_per_rank": rows,
        "forwards_per_step": rows // micro,
        "steps": recipe.run.steps,
        "tokens_per_step": recipe.tokens_per_step,
        "tokens": recipe.run.steps * recipe.tokens_per_step,
        "device": device,
        "link": link if tp > 1 else None,
        "network": network if dp > 1 else None,
        "memory_gb": {name: value / 1e9 for name, value in memory.items()},
        "memory_total_gb": sum(memory.values()) / 1e9,
        "device_memory_gb": chosen.memory_gb,
        "fits": sum(memory.values()) < chosen.memory_gb * 1e9,
        "step_ms": {name: 1e3 * value for name, value in seconds._asdict().items()},
        "step_seconds": step,
        "tokens_per_s": recipe.tokens_per_step / step,
        "mfu": flops / step / (dp * tp * chosen.tflops * 1e12),
        "hours": recipe.run.steps * step / 3600,
        "device_hours": recipe.run.steps * step / 3600 * dp * tp,
    }


def _seconds(
    recipe: Recipe, shape: ModelShape, dp: int, rows: int, micro: int, device: Any, link: Link, network: Link
) -> Seconds:
    tp, forwards = recipe.parallel.tp, rows // micro
    recomputed = 4 / 3 if recipe.run.checkpoint_activations else 1.0
    rate = device.tflops * 1e12 * device.flop_share * GEMM_SHARE
    tokens = rows * recipe.data.sequence
    compute = flops_per_token(shape, recipe.data.sequence) * tokens / tp * recomputed / rate
    low = LOW if recipe.run.precision == "bf16" else FULL
    tensor = hidden = 0.0
    if tp > 1:
        size = micro * recipe.data.sequence * shape.hidden_size * low
        one = link.in_model_us(size, tp) * 1e-6
        passes = 3 if recipe.run.checkpoint_activations else 2  # forward, backward, and the forward once more
        modules = 2 * shape.num_layers
        module = compute / forwards / passes / modules  # seconds of compute an all-reduce can hide under
        exposed, covered = all_reduce_seconds(recipe.wiring, one, module)
        tensor, hidden = exposed * passes * forwards, covered * passes * forwards
        tensor += one * 2 * forwards  # the embedding's, forward and backward
    data = 0.0
    if dp > 1:
        share = _rank_parameters(shape, tp)
        # An all-reduce moves every byte twice; a gather or a scatter of the same bytes once.
        gathers = 2 * forwards * network.in_model_us(share * low, dp) / 2
        scatter = network.in_model_us(share * FULL, dp) / 2
        data = max(0.0, (gathers + scatter) * 1e-6 - compute)
    return Seconds(compute, tensor, hidden, hidden * link.flop_contention, data)


def all_reduce_seconds(wiring: Wiring, one: float, module: float) -> tuple[float, float]:
    """(exposed, hidden) seconds of the all-reduces of one pass over the layers. However many are in flight, each has the time of one
    module to hide under."""
    each = [min(one, module) if all_reduce.modules_between else 0.0 for all_reduce in dependencies(wiring).all_reduces]
    return len(each) * one - sum(each), sum(each)


def _rank_parameters(shape: ModelShape, tp: int) -> float:
    own = RankShape(shape, tp)
    vocabulary = shape.vocab_size * shape.hidden_size * (1 if shape.tied_embeddings else 2) / tp
    norms = shape.hidden_size * (2 * shape.num_layers + 1)
    return shape.num_layers * (own.attention_parameters + own.mlp_parameters) + vocabulary + norms


def _memory(recipe: Recipe, shape: ModelShape, dp: int, micro: int, *, accumulated: bool) -> dict[str, float]:
    """Bytes of one rank at the worst moment of a step."""
    tp = recipe.parallel.tp
    own, parameters = RankShape(shape, tp), _rank_parameters(shape, tp)
    low = LOW if recipe.run.precision == "bf16" else FULL
    layer = own.attention_parameters + own.mlp_parameters + 2 * shape.hidden_size
    vocabulary = parameters - shape.num_layers * layer
    tokens = micro * recipe.data.sequence
    stream = tokens * shape.hidden_size * low
    inner = tokens * low * (shape.head_dim * (2 * own.heads + 2 * own.kv_heads) + 3 * own.columns)
    one_layer = 6 * stream + inner  # inputs, normed inputs and outputs of two modules; projections, attention, MLP
    kept = 3 * stream if recipe.run.checkpoint_activations else one_layer  # recomputed: stream and all-reduces in flight
    chunk = min(recipe.run.loss_chunk, tokens) * shape.vocab_size / tp
    return {
        "weights": FULL * parameters / dp,
        "gradients": FULL * parameters * (1.0 if accumulated and dp > 1 else 1 / dp),
        "optimizer": 2 * FULL * parameters / dp,
        "gathered weights": low * ((3 * layer if dp > 1 else shape.num_layers * layer) + vocabulary),
        "activations": shape.num_layers * kept + one_layer,
        "loss": chunk * (2 * low + FULL) + FULL * vocabulary,
        "runtime": RUNTIME_BYTES,
    }


def to_text(plan: dict[str, Any]) -> str:
    memory = ", ".join(f"{name} {value:.1f}" for name, value in plan["memory_gb"].items())
    step = plan["step_ms"]
    links = " ".join(f"{kind} {plan[kind]}" for kind in ("link", "network") if plan[kind])
    warning = "" if plan["fits"] else "  DOES NOT FIT: more ranks, smaller micro_rows or checkpoint_activations"
    lines = [
        f"{plan['name']}: {plan['wiring']}, {plan['parameters'] / 1e9:.2f} B parameters",
        f"ranks     {plan['ranks']} ({plan['dp']} copies x {plan['tp']}), {plan['rows_per_rank']} rows a rank and step in "
        f"{plan['forwards_per_step']} forwards",
        f"steps     {plan['steps']:,} of {plan['tokens_per_step']:,} tokens: {plan['tokens'] / 1e9:.2f} B tokens",
        f"memory    {plan['memory_total_gb']:.1f} of {plan['device_memory_gb']:.0f} GB a rank{warning}",
        f"          ({memory})",
        f"step      {1e3 * plan['step_seconds']:,.0f} ms on {plan['device']} {links}: compute {step['compute']:,.0f}, slowed by "
        f"{step['contention']:,.0f} beside all-reduces",
        f"          tensor parallelism: {step['tensor_hidden']:,.0f} ms of all-reduces hidden, {step['tensor']:,.0f} waited for; "
        f"data parallelism: {step['data']:,.0f} waited for",
        f"speed     {plan['tokens_per_s']:,.0f} tokens/s, MFU {plan['mfu']:.0%}",
        f"time      {plan['hours']:,.1f} h, {plan['device_hours']:,.0f} device hours (planned, not measured)",
    ]
    return "\n".join(lines)
