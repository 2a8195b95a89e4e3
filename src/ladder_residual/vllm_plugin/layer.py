"""vLLM's decoder layers with another wiring: the layer's own attention, MLP and norms, our ``forward``.

Between layers travels what vLLM's models hand on, ``(hidden_states, residual)``. Between two rewired layers ``hidden_states`` is the
last module's partial, not yet reduced, and ``residual`` is ``Carried``. Elsewhere, at the ends of a pipeline stage and beside a layer
that stayed vLLM's own, both are what vLLM expects: the last module's reduced output, and the stream without it. That pair is all a ladder
needs to go on in the next stage.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from vllm.distributed import get_tensor_model_parallel_world_size, tensor_model_parallel_all_reduce
from vllm.model_executor.layers.layernorm import GemmaRMSNorm

from . import ops  # defines torch.ops.ladder_residual
from .communicator import Communicator
from .plan import AVERAGED, LOCAL, OWN_FIRST, REDUCED, WITH_NEXT, Boundary, can_run_in_line, on_one_rank
from .versions import leave_experts_unreduced, leave_unreduced


class Carried(NamedTuple):
    """The stream, and the partials whose all-reduces are in flight, oldest first."""

    stream: Tensor
    in_flight: tuple[Tensor, ...] = ()
    arrived: bool = False  # the one in flight is reduced already, it came from another stage
    own_joined: bool = False  # this rank's own part of those in flight is in the stream already
    # Weights of the post-norms that wait for their all-reduces: of those in flight, then of the partial that travels with this.
    after: tuple[Tensor, ...] = ()


class Parts(NamedTuple):
    """What vLLM calls the parts of a family's layer."""

    mlp: str = "mlp"
    mlp_norm: str = "post_attention_layernorm"
    attention_after: str | None = None  # post-norms
    mlp_after: str | None = None
    multiplier: str | None = None  # scales what a module adds
    pairs: bool = True  # hands on (hidden_states, residual); else their sum


class LayerPlan(NamedTuple):
    """The boundaries around and inside one layer."""

    below: Boundary | None  # into this layer's attention; None: nothing below
    middle: Boundary  # from attention to MLP
    above: Boundary  # from the MLP upwards
    hands_on_to_vllm: bool  # what comes next is the end of a stage, or a layer of vLLM's own
    ranks: int
    blocking_through_us: bool  # see Communicator.replaces_blocking


class RewiredLayer(nn.Module):
    """Mixed in before vLLM's decoder layer class; only ``forward`` differs."""

    plan: LayerPlan
    parts: Parts
    # vLLM's own, by the names all served families share.
    self_attn: nn.Module
    input_layernorm: nn.Module

    def forward(
        self, positions: Tensor, hidden_states: Tensor, residual: Tensor | Carried | None = None, **unused: Any
    ) -> tuple[Tensor, Tensor | Carried]:
        plan, parts = self.plan, self.parts
        mlp = getattr(self, parts.mlp)
        x, carried = self._enter(hidden_states, residual)
        partial = self._scaled(self.self_attn(positions=positions, hidden_states=x))
        if plan.middle.joins == WITH_NEXT:
            partial = partial + self._scaled(mlp(x))
        else:
            partial, carried = self._with_post_norm(parts.attention_after, plan.middle, partial, carried)
            x, carried = self._cross(plan.middle, partial, carried, getattr(self, parts.mlp_norm), next_is_attention=False)
            partial = self._scaled(mlp(x))
        partial, carried = self._with_post_norm(parts.mlp_after, plan.above, partial, carried)
        if plan.hands_on_to_vllm:
            return self._leave(plan.above, partial, carried)
        return partial, carried

    def _scaled(self, output: Tensor) -> Tensor:
        return output if self.parts.multiplier is None else output * getattr(self, self.parts.multiplier)

    def _with_post_norm(
        self, name: str | None, boundary: Boundary, partial: Tensor, carried: Carried
    ) -> tuple[Tensor, Carried]:
        """A post-norm sees the reduced output, so its weight travels until then."""
        if name is None:
            return partial, carried
        norm: Any = getattr(self, name)
        if self.plan.ranks == 1 or boundary.joins != REDUCED:
            return norm(partial), carried
        return partial, carried._replace(after=(*carried.after, norm.weight))

    def _enter(self, hidden_states: Tensor, residual: Tensor | Carried | None) -> tuple[Tensor, Carried]:
        norm, below = self.input_layernorm, self.plan.below
        if residual is None:  # the embedding, or the whole stream of a layer of vLLM's own
            return norm(hidden_states), Carried(hidden_states)
        assert below is not None
        if not isinstance(residual, torch.Tensor):
            return self._cross(below, hidden_states, residual, norm, next_is_attention=True)
        # From another stage, or from a layer of vLLM's own.
        if below.in_flight:  # the first module here does not read that output yet
            return norm(residual), Carried(residual, (hidden_states,), arrived=True)
        x, stream = norm(hidden_states, residual)
        return x, Carried(stream)

    def _cross(
        self, boundary: Boundary, partial: Tensor, carried: Carried, norm: nn.Module, *, next_is_attention: bool
    ) -> tuple[Tensor, Carried]:
        stream, in_flight, arrived, own_joined, after = carried
        ranks = self.plan.ranks
        if ranks == 1:
            return _cross_alone(boundary, partial, carried, norm)
        if boundary.joins == LOCAL:
            if not boundary.average_streams:
                x, stream = norm(partial, stream)
                return x, Carried(stream)
            stream = tensor_model_parallel_all_reduce((stream + partial) / ranks)
            return norm(stream), Carried(stream)
        if boundary.joins == AVERAGED:
            stream = tensor_model_parallel_all_reduce(partial + stream / ranks)
            return norm(stream), Carried(stream)
        assert boundary.joins in (REDUCED, OWN_FIRST)
        keep, epsilon = boundary.in_flight, norm.variance_epsilon
        if not in_flight and not keep and not self.plan.blocking_through_us:
            # vLLM's own sequence, which its passes know how to fuse.
            x, stream = norm(self._all_reduced(partial, after), stream)
            return x, Carried(stream)
        own_first = boundary.joins == OWN_FIRST
        weight, offset = norm.weight, _offset(norm)
        if keep > len(in_flight) and not own_first:
            x = torch.ops.ladder_residual.begin(
                partial, [*in_flight], stream, weight, epsilon, offset, arrived, next_is_attention
            )
        else:
            x, stream = torch.ops.ladder_residual.boundary(
                partial,
                [*in_flight],
                stream,
                weight,
                epsilon,
                offset,
                [*after],
                keep,
                arrived,
                own_joined,
                own_first,
                next_is_attention,
            )
        if not keep:
            return x, Carried(stream)
        return x, Carried(stream, (*in_flight, partial)[-keep:], own_joined=own_first, after=after[-keep:])

    def _all_reduced(self, partial: Tensor, after: tuple[Tensor, ...]) -> Tensor:
        reduced = tensor_model_parallel_all_reduce(partial)
        norm: Any = self.input_layernorm
        return ops.rms_norm(reduced, after[-1], norm.variance_epsilon, _offset(norm)) if after else reduced

    def _leave(self, boundary: Boundary, partial: Tensor, carried: Carried) -> tuple[Tensor, Tensor]:
        """vLLM adds the two, in the next stage or in the last norm."""
        stream, in_flight, arrived, own_joined, after = carried
        ranks = self.plan.ranks
        if ranks == 1:
            return partial, sum(in_flight, start=stream)
        if boundary.joins == AVERAGED or boundary.average_streams:
            own = stream / ranks + (partial if boundary.joins == AVERAGED else partial / ranks)
            stream = tensor_model_parallel_all_reduce(own)
            return stream, torch.zeros_like(stream)
        if boundary.joins == LOCAL:
            return partial, stream
        if not in_flight and not self.plan.blocking_through_us:
            return self._all_reduced(partial, after), stream
        norm: Any = self.input_layernorm
        epsilon, offset = norm.variance_epsilon, _offset(norm)
        return torch.ops.ladder_residual.drain(partial, [*in_flight], stream, epsilon, offset, [*after], arrived, own_joined)


class RewiredWholeStreamLayer(RewiredLayer):
    """For models that hand on ``hidden_states`` alone, the whole stream. Between rewired layers it is a pair all the same."""

    def forward(self, positions: Tensor, hidden_states: Any, *unused: Any) -> Any:  # type: ignore[override]
        pair = (hidden_states, None) if isinstance(hidden_states, torch.Tensor) else hidden_states
        output, residual = super().forward(positions, *pair)
        return output + residual if isinstance(residual, torch.Tensor) else (output, residual)


def _cross_alone(boundary: Boundary, partial: Tensor, carried: Carried, norm: nn.Module) -> tuple[Tensor, Carried]:
    """One rank: a partial is reduced already. As many kernels as vLLM's own layer, and all visible to Inductor."""
    stream, in_flight = carried.stream, carried.in_flight
    if not boundary.in_flight:
        x, stream = norm(sum(in_flight, start=partial), stream)
        return x, Carried(stream)
    if not in_flight:
        return norm(stream), Carried(stream, (partial,))
    x, stream = norm(*in_flight, stream)
    return x, Carried(stream, (partial,))


def _offset(norm: nn.Module) -> float:
    """What the weights are stored without."""
    return 1.0 if isinstance(norm, GemmaRMSNorm) else 0.0


@cache
def _rewired_class(base: type[nn.Module], pairs: bool) -> type[nn.Module]:
    mixin = RewiredLayer if pairs else RewiredWholeStreamLayer
    return type(f"Rewired{base.__name__}", (mixin, base), {"__module__": __name__})


def rewire_layers(
    layers: nn.ModuleList, start: int, end: int, plan: list[Boundary], parts: Parts, communicator: Communicator | None
) -> None:
    """Give the layers of this stage (``start`` to ``end``) their place in ``plan``, and leave their all-reduces to us.

    A layer with nothing to defer stays vLLM's own, all-reduces included: what its authors make faster stays so. Where no all-reduce is
    better done beside a module, the projections reduce their outputs as in vLLM's own layer, and the layers are those of one rank.
    """
    ranks = get_tensor_model_parallel_world_size()
    in_line = communicator is not None and can_run_in_line(plan) and not communicator.overlap.anywhere
    if in_line:
        ranks, communicator = 1, None
    if ranks == 1:
        plan = [on_one_rank(boundary) for boundary in plan]
    through_us = communicator is not None and communicator.replaces_blocking
    rewired = {index for index in range(start, end) if through_us or not _is_standard(plan, index)}
    for index in rewired:
        layer: Any = layers[index]
        if not in_line:
            _leave_partials(layer.self_attn, getattr(layer, parts.mlp))
        base: Any = type(layer)
        layer.__class__ = _rewired_class(base, parts.pairs)
        layer.parts = parts
        layer.plan = LayerPlan(
            below=plan[2 * index - 1] if index else None,
            middle=plan[2 * index],
            above=plan[2 * index + 1],
            hands_on_to_vllm=index + 1 not in rewired,
            ranks=ranks,
            blocking_through_us=through_us,
        )
        if layer.plan.middle.joins == WITH_NEXT:
            delattr(layer, parts.mlp_norm)  # one norm for both modules; the checkpoint has no weights for another


def _is_standard(plan: list[Boundary], index: int) -> bool:
    """Whether all three boundaries of a layer are an all-reduce that is waited for at once, as in vLLM's own layer."""
    around = plan[max(0, 2 * index - 1) : 2 * index + 2]
    return all(boundary == Boundary(REDUCED, in_flight=0) for boundary in around)


def _leave_partials(attention: Any, mlp: Any) -> None:
    leave_unreduced(attention.o_proj)
    if hasattr(mlp, "experts"):
        leave_experts_unreduced(mlp.experts)
    else:
        leave_unreduced(mlp.down_proj)
