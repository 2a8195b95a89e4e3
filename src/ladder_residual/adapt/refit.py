"""Refit a converted model in closed form: a pass over a text, no gradients.

A converted module reads an older stream than it was trained on, so its projections are no longer the right ones for what they read.
The layers are walked once, original and converted model side by side. n is a module's norm, x the stream it reads, z what enters its
output projection:

    inputs (q, k, v, gate, up)    W' minimises |W' n(x_converted) - W n(x_original)|^2
    outputs (o, down)             W' minimises |W' z_converted - (original stream after the module - converted one before it)|^2

each with a ridge towards W, which is chosen on rows that are held out. The output projections also take up what the layers below
got wrong. Only sums over the tokens are kept: of n(x)^T n(x) and n(x_original)^T n(x) for all inputs of a module, as W' = W M with the
same M.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..core.config import Wiring
from ..core.reduce import Reducer
from ..core.wiring import Branch, State, finalize, step
from ..models.families import family_of
from ..models.finite import NonFiniteError, cast_finite
from ..models.hf import decoder_layers, rewire
from .probe import inputs_of_layers

RIDGES = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0)  # of the mean of the diagonal of x^T x
BATCH = 8  # rows
HELD_OUT = 4  # of so many rows one


class Sums:
    """Over tokens, of x^T x and y^T x: what least squares needs of a text of any length."""

    def __init__(self) -> None:
        self.gram: Any = 0.0
        self.cross: Any = 0.0

    def add(self, x: Tensor, y: Tensor) -> None:
        x, y = x.reshape(-1, x.shape[-1]).float(), y.reshape(-1, y.shape[-1]).float()
        self.gram = self.gram + (x.T @ x).double()
        self.cross = self.cross + (y.T @ x).double()


class Regression:
    """W that minimises |W x - y|^2 + r |W - prior|^2. Of RIDGES that r is taken whose W is best on rows that were held out; if W stays
    better as it is, it stays."""

    def __init__(self) -> None:
        self.fit, self.held_out = Sums(), Sums()

    def add(self, x: Tensor, y: Tensor) -> None:
        """A batch of rows; batches have a multiple of HELD_OUT, but for the last."""
        held_out = torch.arange(len(x), device=x.device) % HELD_OUT == HELD_OUT - 1
        self.fit.add(x[~held_out], y[~held_out])
        self.held_out.add(x[held_out], y[held_out])

    def solve(self, prior: Tensor, where: str) -> Tensor:
        """``where``: the module that asks, for an error."""
        prior = prior.double()
        gram, cross = self.held_out.gram, self.held_out.cross
        mean = float((self.fit.gram + gram).diagonal().mean())
        if not math.isfinite(mean):
            raise NonFiniteError(f"{where}: what it reads on the calibration text is NaN or infinite")
        if mean == 0:
            return prior

        def error(weight: Tensor) -> float:  # up to a constant
            return float(((weight @ gram - 2 * cross) * weight).sum())

        errors = {ridge: error(ridge_regression(self.fit.gram, self.fit.cross, prior, ridge)) for ridge in RIDGES}
        best = min(errors, key=lambda ridge: errors[ridge])
        if errors[best] >= error(prior):
            return prior
        return ridge_regression(self.fit.gram + gram, self.fit.cross + cross, prior, best)


def ridge_regression(gram: Any, cross: Any, prior: Tensor, ridge: float) -> Tensor:
    penalty = ridge * float(gram.diagonal().mean())
    eye = torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    factor, failed = torch.linalg.cholesky_ex(gram + penalty * eye)
    if failed:
        warnings.warn("the calibration text leaves singular statistics: ridges are raised; give more text", stacklevel=1)
    while failed:
        penalty *= 10
        factor, failed = torch.linalg.cholesky_ex(gram + penalty * eye)
    return torch.cholesky_solve((cross + penalty * prior).T, factor).T


class Refit:
    """Walks the layers of ``model``, a standard model whose weights become those of ``wiring``, as ``dtype`` can hold them."""

    @torch.no_grad()
    def __init__(
        self, model: PreTrainedModel, wiring: Wiring, rows: Tensor, dtype: torch.dtype = torch.float32, *, outputs: bool = True
    ) -> None:
        self.family = family_of(model.config.to_dict())
        rewire(model, "standard")
        check_untied(model)
        self.model, self.wiring, self.layers = model, wiring, decoder_layers(model)
        self.dtype = dtype
        self.standard = Wiring.parse("standard", wiring.num_layers)
        self.outputs = outputs and not self.family.post_norm  # behind a norm the output is no linear function of W
        self.reducer = Reducer()
        self.changed: dict[str, Tensor] = {}
        self.original: list[State] = []
        self.arguments: list[list[dict[str, Any]]] = []
        for ids in rows.to(model.device).split(BATCH):
            start, arguments = inputs_of_layers(model, ids)
            self.original.append(State(start))
            self.arguments.append(arguments)
        self.converted = list(self.original)

    @torch.no_grad()
    def run(self, advance: Callable[[], object] = lambda: None) -> dict[str, Tensor]:
        """The projections that changed, by name."""
        names = {module: name for name, module in self.model.named_modules()}
        family = self.family
        for index, layer in enumerate(self.layers):
            for norm, module in ((family.attention_norm, family.attention), (family.mlp_norm, family.mlp)):
                self._module(index, getattr(layer, norm) if norm else None, getattr(layer, module), module == family.mlp, names)
            advance()
        return self.changed

    def _module(self, index: int, norm: nn.Module | None, module: nn.Module, is_mlp: bool, names: dict[nn.Module, str]) -> None:
        if index < self.wiring.layers[0]:  # both models are the same so far
            self.original = self.converted = [
                self._next(self.standard, index, is_mlp, batch, state) for batch, state in enumerate(self.original)
            ]
            return
        inputs, readers = Regression(), list[nn.Linear]()
        before, self.original = self.original, []
        for batch, state in enumerate(before):
            with linear_calls(module) as calls:
                self.original.append(self._next(self.standard, index, is_mlp, batch, state))
            x_original = self._read(self.standard, index, state, norm)
            readers = readers or [linear for linear, x in calls if torch.equal(x, x_original)]
            inputs.add(self._read(self.wiring, index, self.converted[batch], norm), x_original)
        map_inputs = inputs.solve(torch.eye(x_original.shape[-1], device=x_original.device), names[module])
        for linear in readers:
            self._change(linear, linear.weight.double() @ map_inputs, names)
        if self.outputs:
            self._outputs(index, module, is_mlp, names)
        self.converted = [self._next(self.wiring, index, is_mlp, batch, state) for batch, state in enumerate(self.converted)]

    def _outputs(self, index: int, module: nn.Module, is_mlp: bool, names: dict[nn.Module, str]) -> None:
        outputs = Regression()
        layer: Any = self.layers[index]
        scale = getattr(layer, self.family.multiplier) if self.family.multiplier else 1.0
        for batch, state in enumerate(self.converted):
            with linear_calls(module) as calls:
                self._next(self.wiring, index, is_mlp, batch, state)
            linear, z = calls[-1]
            missing = finalize(self.original[batch], self.reducer) - finalize(state, self.reducer)
            outputs.add(z, missing / scale - (0 if linear.bias is None else linear.bias))
        self._change(linear, outputs.solve(linear.weight, names[module]), names)

    def _change(self, linear: nn.Linear, weight: Tensor, names: dict[nn.Module, str]) -> None:
        name = f"{names[linear]}.weight"
        rounded = cast_finite(name, weight, self.dtype).to(linear.weight)
        if not torch.equal(rounded, linear.weight):
            linear.weight.copy_(rounded)
            self.changed[name] = linear.weight.detach()

    def _next(self, wiring: Wiring, index: int, is_mlp: bool, batch: int, state: State) -> State:
        """One module of the layer."""
        layer: Any = self.layers[index]
        branch = layer.branches(self.arguments[batch][index])[is_mlp]
        return step(wiring, index, state, (branch,), self.reducer)

    def _read(self, wiring: Wiring, index: int, state: State, norm: nn.Module | None) -> Tensor:
        """What a module's projections would read."""
        seen: list[Tensor] = []

        def look(x: Tensor) -> Tensor:
            seen.append(x)
            return x

        step(wiring, index, state, (Branch(look),), self.reducer)
        return seen[0] if norm is None else norm(seen[0])


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
