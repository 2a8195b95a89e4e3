"""vLLM's decoder layers with another wiring: the layer's own attention, MLP and norms, our ``forward``.

Between layers travels what vLLM's models hand on, ``(hidden_states, residual)``. Between two rewired layers ``hidden_states`` is the
last module's partial, not yet summed, and ``residual`` is ``Carried``. Elsewhere, at the ends of a pipeline stage and beside a layer
that stayed vLLM's own, both are what vLLM expects: the last module's sum, and the stream without it. That pair is all a ladder
needs to go on in the next stage.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from vllm.distributed import get_tensor_model_parallel_world_size, tensor_model_parallel_all_reduce

from . import ops  # noqa: F401  defines torch.ops.ladder_residual
from .link import Link
from .plan import MEAN, OWN, SUM, Boundary


class Carried(NamedTuple):
    """The stream, and the partial whose sum over ranks is in flight (``arrived``: complete, it came from another stage)."""

    stream: Tensor
    in_flight: Tensor | None = None
    arrived: bool = False


class LayerPlan(NamedTuple):
    """The boundaries around and inside one layer."""

    below: Boundary | None  # into this layer's attention; None: nothing below
    middle: Boundary  # from attention to MLP
    above: Boundary  # from the MLP upwards
    hands_on_to_vllm: bool  # what comes next is the end of a stage, or a layer of vLLM's own
    ranks: int
    blocking_through_link: bool  # see Link.replaces_blocking_sums


class RewiredLayer(nn.Module):
    """Mixed in before vLLM's decoder layer class; only ``forward`` differs."""

    plan: LayerPlan
    mlp_name: str
    # vLLM's own, by the names all served families share.
    self_attn: nn.Module
    input_layernorm: nn.Module
    post_attention_layernorm: nn.Module

    def forward(
        self, positions: Tensor, hidden_states: Tensor, residual: Tensor | Carried | None, **unused: Any
    ) -> tuple[Tensor, Tensor | Carried]:
        plan = self.plan
        x, carried = self._enter(hidden_states, residual)
        partial = self.self_attn(positions=positions, hidden_states=x)
        x, carried = self._cross(plan.middle, partial, carried, self.post_attention_layernorm, next_is_attention=False)
        partial = getattr(self, self.mlp_name)(x)
        if plan.hands_on_to_vllm:
            return self._leave(plan.above, partial, carried)
        return partial, carried

    def _enter(self, hidden_states: Tensor, residual: Tensor | Carried | None) -> tuple[Tensor, Carried]:
        norm, below = self.input_layernorm, self.plan.below
        if below is None:
            return norm(hidden_states), Carried(hidden_states)
        assert residual is not None
        if not isinstance(residual, torch.Tensor):
            return self._cross(below, hidden_states, residual, norm, next_is_attention=True)
        # From another stage, or from a layer of vLLM's own.
        if below.keep:  # the first module here does not read that sum yet
            return norm(residual), Carried(residual, hidden_states, arrived=True)
        x, stream = norm(hidden_states, residual)
        return x, Carried(stream)

    def _cross(
        self, boundary: Boundary, partial: Tensor, carried: Carried, norm: nn.Module, *, next_is_attention: bool
    ) -> tuple[Tensor, Carried]:
        stream, in_flight, arrived = carried
        ranks = self.plan.ranks
        if ranks == 1:
            return _cross_alone(boundary, partial, carried, norm)
        if boundary.join == OWN:
            if not boundary.agree:
                x, stream = norm(partial, stream)
                return x, Carried(stream)
            stream = tensor_model_parallel_all_reduce((stream + partial) / ranks)
            return norm(stream), Carried(stream)
        if boundary.join == MEAN:
            stream = tensor_model_parallel_all_reduce(partial + stream / ranks)
            return norm(stream), Carried(stream)
        assert boundary.join == SUM
        if in_flight is None and not boundary.keep and not self.plan.blocking_through_link:
            # vLLM's own sequence, which its passes know how to fuse.
            x, stream = norm(tensor_model_parallel_all_reduce(partial), stream)
            return x, Carried(stream)
        x, stream = torch.ops.ladder_residual.boundary(
            partial, in_flight, stream, norm.weight, norm.variance_epsilon, bool(boundary.keep), arrived, next_is_attention
        )
        return x, Carried(stream, partial if boundary.keep else None)

    def _leave(self, boundary: Boundary, partial: Tensor, carried: Carried) -> tuple[Tensor, Tensor]:
        """vLLM adds the two, in the next stage or in the last norm."""
        stream, in_flight, arrived = carried
        ranks = self.plan.ranks
        if ranks == 1:
            return partial, stream if in_flight is None else stream + in_flight
        if boundary.join == MEAN or boundary.agree:
            own = stream / ranks + (partial if boundary.join == MEAN else partial / ranks)
            stream = tensor_model_parallel_all_reduce(own)
            return stream, torch.zeros_like(stream)
        if boundary.join == OWN:
            return partial, stream
        if in_flight is None and not self.plan.blocking_through_link:
            return tensor_model_parallel_all_reduce(partial), stream
        return torch.ops.ladder_residual.drain(partial, in_flight, stream, arrived)


def _cross_alone(boundary: Boundary, partial: Tensor, carried: Carried, norm: nn.Module) -> tuple[Tensor, Carried]:
    """One rank: a partial is its sum already. As many kernels as vLLM's own layer, and all visible to Inductor."""
    stream, in_flight, _ = carried
    if not boundary.keep:
        x, stream = norm(partial if in_flight is None else in_flight + partial, stream)
        return x, Carried(stream)
    if in_flight is None:
        return norm(stream), Carried(stream, partial)
    x, stream = norm(in_flight, stream)
    return x, Carried(stream, partial)


@cache
def _rewired_class(base: type[nn.Module]) -> type[nn.Module]:
    return type(f"Rewired{base.__name__}", (RewiredLayer, base), {"__module__": __name__})


def rewire_layers(layers: nn.ModuleList, start: int, end: int, plan: list[Boundary], mlp_name: str, link: Link | None) -> None:
    """Give the layers of this stage (``start`` to ``end``) their place in ``plan``, and leave their sums to us.

    A layer with nothing to defer stays vLLM's own, sums included: what its authors make faster stays so.
    """
    ranks = get_tensor_model_parallel_world_size()
    if ranks == 1:
        plan = [Boundary(SUM, boundary.keep) for boundary in plan]  # one rank's own share, mean and sum are all the same
    through_link = link is not None and link.replaces_blocking_sums
    rewired = {index for index in range(start, end) if through_link or not _is_standard(plan, index)}
    for index in rewired:
        layer: Any = layers[index]
        _leave_sums_open(layer.self_attn, getattr(layer, mlp_name))
        base: Any = type(layer)
        layer.__class__ = _rewired_class(base)
        layer.mlp_name = mlp_name
        layer.plan = LayerPlan(
            below=plan[2 * index - 1] if index else None,
            middle=plan[2 * index],
            above=plan[2 * index + 1],
            hands_on_to_vllm=index + 1 not in rewired,
            ranks=ranks,
            blocking_through_link=through_link,
        )


def _is_standard(plan: list[Boundary], index: int) -> bool:
    """Whether all three boundaries of a layer are a sum that is waited for at once, as in vLLM's own layer."""
    around = plan[max(0, 2 * index - 1) : 2 * index + 2]
    return all(boundary == Boundary(SUM, keep=0) for boundary in around)


def _leave_sums_open(attention: Any, mlp: Any) -> None:
    attention.o_proj.reduce_results = False
    if hasattr(mlp, "experts"):
        mlp.experts.moe_config.skip_final_all_reduce = True
    else:
        mlp.down_proj.reduce_results = False
