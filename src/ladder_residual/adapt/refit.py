"""Refit a converted model in closed form: a pass over a text, no gradients.

A converted module reads an older stream than it was trained on, so its projections are no longer the right ones for what they read.
The layers are walked once, original and converted model side by side. n is a module's norm, x the stream it reads, z what enters its
output projection:

    inputs (q, k, v, gate, up)    W' minimises |W' n(x_converted) - W n(x_original)|^2
    outputs (o, down)             W' minimises |W' z_converted - (original stream after the module - converted one before it)|^2

each with a ridge towards W, which is chosen on rows that are held out. The output projections also take up what the layers below
got wrong. Their errors count relative to the stream, as the next norm reads them: a first token, whose stream is a hundred times as
large as the others', would decide alone. Only sums over the tokens are kept, and only of the module at hand: of n(x)^T n(x) and
n(x_original)^T n(x) for all inputs of a module, as W' = W M with the same M.
With a format, each projection is rounded to it before the walk goes on: what is lost there the next ones make up for.
Tensor-parallel ranks share the tokens: their sums are all-reduced, and what enters an output projection is gathered first.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..core.config import Wiring
from ..core.reduce import Reducer
from ..core.wiring import Branch, State, finalize, step
from ..models.families import family_of
from ..models.finite import cast_finite
from ..models.hf import decoder_layers, rewire
from ..models.quantization.rounding import Format, Rounded
from .least_squares import LOCAL, Regression
from .probe import inputs_of_layers

BATCH = 8  # rows

# Of a layer: its output projections by name, and ``MODULE.inputs``, the M of its input projections. With a format: of each projection
# NAME its numbers, and its scales as ``NAME.scales``.
Found = dict[str, Tensor]


class Refit:
    """Walks the layers of ``model``, a standard model (or one rank's shards) whose weights become those of ``wiring``, as ``dtype``
    can hold them, or rounded to a ``format`` (then by one process)."""

    @torch.no_grad()
    def __init__(
        self,
        model: PreTrainedModel,
        wiring: Wiring,
        rows: Tensor,
        dtype: torch.dtype = torch.float32,
        *,
        outputs: bool = True,
        format: Format | None = None,
    ) -> None:
        self.family = family_of(model.config.to_dict())
        rewire(model, "standard")
        check_untied(model)
        self.model, self.wiring, self.layers, self.dtype = model, wiring, decoder_layers(model), dtype
        self.standard, self.format = Wiring.parse("standard", wiring.num_layers), format
        self.first = 0 if format else wiring.layers[0]  # below, both models are the same
        self.outputs = outputs and not self.family.post_norm  # behind a norm the output is no linear function of W
        self.reducer: Reducer = self.layers[0].reducer  # type: ignore[assignment]
        self.names = {module: name for name, module in model.named_modules()}
        self.changed: dict[str, tuple[int, str]] = {}  # by name of the weight: its layer, and what was found there
        self.singular: list[str] = []  # modules for which a ridge had to be raised
        self.original: list[State] = []
        self.arguments: list[list[dict[str, Any]]] = []
        for ids in rows.to(model.device).split(BATCH):
            start, arguments = inputs_of_layers(model, ids)
            self.original.append(State(start))
            self.arguments.append(arguments)
        self.converted = list(self.original)

    @torch.no_grad()
    def run(self, kept: Any = None, advance: Callable[[], object] = lambda: None) -> dict[str, Tensor]:
        """The projections that changed, by name. ``kept`` (a dict, a LayerStore) gets what is found for each layer; layers that it
        holds already are not fitted again."""
        kept = {} if kept is None else kept
        for index in range(len(self.layers)):
            self._layer(index, kept)
            advance()
        return {name: self.model.get_parameter(name).detach() for name in self.changed}

    def whole(self, kept: Any, read: Callable[[str], Tensor]) -> dict[str, Tensor | Rounded]:
        """What has changed, not only this rank's shards, after ``run``, on rank 0; ``read`` gives an original weight."""
        found = lru_cache(1)(kept.get)  # all ranks ask for a layer, one after the other
        whole: dict[str, Tensor | Rounded] = {}
        for name, (layer, key) in self.changed.items():
            new = found(layer)[key]
            if self.format is not None:
                whole[name] = Rounded(new, found(layer)[f"{name}.scales"])
            elif self.reducer.rank == 0:
                whole[name] = new if name == key else mapped(read(name), new).to(self.dtype)
        return whole

    @torch.no_grad()
    def alone(self, advance: Callable[[], object] = lambda: None) -> list[nn.Module]:
        """Every layer of ``wiring`` as it would be were it the only one converted; the model's own stay as they are."""
        whole, found = self.wiring, list[nn.Module]()
        for index, layer in enumerate(self.layers):
            before = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
            self.wiring, self.first = Wiring(whole.kind, (index,), whole.num_layers), index
            self.converted = list(self.original)
            self._layer(index, {})
            found.append(copy.deepcopy(layer))
            layer.load_state_dict(before)
            advance()
        self.wiring = whole
        return found

    def _layer(self, index: int, kept: Any) -> None:
        if index < self.first:
            for is_mlp in (False, True):
                self.original = self.converted = [
                    self._next(self.standard, index, is_mlp, batch, state) for batch, state in enumerate(self.original)
                ]
            return
        known = kept.get(index)
        found: Found = {} if known is None else known
        for is_mlp in (False, True):
            self._module(index, is_mlp, found, fit=known is None)
        if known is None:
            kept[index] = found

    def _module(self, index: int, is_mlp: bool, found: Found, *, fit: bool) -> None:
        family, layer = self.family, self.layers[index]
        normed, name = (family.mlp_norm, family.mlp) if is_mlp else (family.attention_norm, family.attention)
        module, norm = getattr(layer, name), getattr(layer, normed) if normed else None
        inputs, readers = Regression(self.reducer), list[nn.Linear]()
        before, self.original = self.original, []
        for batch, state in enumerate(before):
            with linear_calls(module) as calls:
                self.original.append(self._next(self.standard, index, is_mlp, batch, state))
            if readers and not fit:
                continue
            x_original = self._read(self.standard, index, state, norm)
            readers = readers or [linear for linear, x in calls if torch.equal(x, x_original)]
            if fit:
                inputs.add(self._read(self.wiring, index, self.converted[batch], norm), x_original)
        output = calls[-1][0]
        if fit:
            self._inputs(module, readers, inputs, found)
        for linear in readers:
            self._change(linear, f"{self.names[module]}.inputs", index, found)
        if fit:
            self._outputs(index, is_mlp, module, found)
        self._change(output, f"{self.names[output]}.weight", index, found)
        self.converted = [self._next(self.wiring, index, is_mlp, batch, state) for batch, state in enumerate(self.converted)]

    def _inputs(self, module: nn.Module, readers: list[nn.Linear], inputs: Regression, found: Found) -> None:
        key = f"{self.names[module]}.inputs"
        map_inputs = self._solve(inputs, key, torch.eye(self.model.config.hidden_size, device=self.model.device))
        if self.format is not None:
            for linear in readers:
                weight = linear.weight if map_inputs is None else mapped(linear.weight, map_inputs)
                self._round(self.format, linear, weight, inputs, found)
        elif map_inputs is not None:
            found[key] = cast_finite(key, map_inputs, torch.float32)

    def _outputs(self, index: int, is_mlp: bool, module: nn.Module, found: Found) -> None:
        if not self.outputs and self.format is None:
            return
        outputs = Regression(self.reducer)
        layer: Any = self.layers[index]
        scale = getattr(layer, self.family.multiplier) if self.family.multiplier else 1.0
        for batch, state in enumerate(self.converted):
            with linear_calls(module) as calls:
                self._next(self.wiring, index, is_mlp, batch, state)
            linear, z = calls[-1]
            after = finalize(self.original[batch], LOCAL)
            missing = (after - finalize(state, LOCAL)) / scale - (0 if linear.bias is None else linear.bias)
            relative = after.float().square().mean(-1, keepdim=True).clamp_min(1e-12).rsqrt()
            outputs.add(self.reducer.gather(z) * relative, missing * relative)
        key, prior = f"{self.names[linear]}.weight", self.reducer.gather(linear.weight.detach())
        weight = self._solve(outputs, key, prior) if self.outputs else None
        if self.format is not None:
            self._round(self.format, linear, prior if weight is None else weight, outputs, found)
        elif weight is not None:
            found[key] = cast_finite(key, weight, self.dtype)

    def _solve(self, regression: Regression, key: str, prior: Tensor) -> Tensor | None:
        weight = regression.solve(prior, key.rpartition(".")[0])
        if regression.singular:
            self.singular.append(key)
        return weight

    def _round(self, format: Format, linear: nn.Linear, weight: Tensor, reads: Regression, found: Found) -> None:
        name = f"{self.names[linear]}.weight"
        rounded = format.round(name, weight, self.dtype, reads.gram)
        found[name], found[f"{name}.scales"] = rounded.numbers.to(torch.bfloat16), rounded.scales  # which holds any of them

    def _change(self, linear: nn.Linear, key: str, index: int, found: Found) -> None:
        """``linear`` gets what was found for it, if anything was."""
        name = f"{self.names[linear]}.weight"
        if self.format is not None:
            key, weight = name, Rounded(found[name], found[f"{name}.scales"]).weight()
        elif key not in found:
            return
        elif key == name:
            width = linear.weight.shape[1]  # of this rank's shard
            weight = cast_finite(name, found[key][:, self.reducer.rank * width :][:, :width], self.dtype)
        else:
            weight = cast_finite(name, mapped(linear.weight, found[key]), self.dtype)
        linear.weight.copy_(weight)
        self.changed[name] = (index, key)

    def _next(self, wiring: Wiring, index: int, is_mlp: bool, batch: int, state: State) -> State:
        """One module of the layer. The states of a walk are read more than once, so their all-reduces are waited for here."""
        layer: Any = self.layers[index]
        branch = layer.branches(self.arguments[batch][index])[is_mlp]
        after = step(wiring, index, state, (branch,), self.reducer)
        return after._replace(pending=tuple(self.reducer.arrived(pending.wait()) for pending in after.pending))

    def _read(self, wiring: Wiring, index: int, state: State, norm: nn.Module | None) -> Tensor:
        """What a module's projections would read."""
        seen: list[Tensor] = []

        def look(x: Tensor) -> Tensor:
            seen.append(x)
            return x

        step(wiring, index, state, (Branch(look),), LOCAL)
        return seen[0] if norm is None else norm(seen[0])


def mapped(weight: Tensor, map_inputs: Tensor) -> Tensor:
    """An input projection for inputs that M maps to those it was trained on."""
    return weight.double() @ map_inputs.to(weight.device).double()


def check_untied(model: PreTrainedModel) -> None:
    """ValueError if two projections of the layers are one tensor: what is right for the one is wrong for the other."""
    owners: dict[int, str] = {}
    for name, parameter in decoder_layers(model).named_parameters(remove_duplicate=False):
        if (first := owners.setdefault(id(parameter), name)) != name:
            raise ValueError(
                f"--refit gives every projection weights of its own, but layers.{first} and layers.{name} share theirs"
            )


@contextmanager
def linear_calls(module: nn.Module) -> Iterator[list[tuple[nn.Linear, Tensor]]]:
    """The linear layers that run in the block, in order, with their inputs."""
    calls: list[tuple[nn.Linear, Tensor]] = []

    def note(linear: Any, inputs: tuple[Tensor, ...]) -> None:
        calls.append((linear, inputs[0]))

    hooks = [part.register_forward_pre_hook(note) for part in module.modules() if isinstance(part, nn.Linear)]
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()
