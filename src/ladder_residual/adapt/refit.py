"""Refit a converted model in closed form: a pass over a text, no gradients.

A converted module reads an older stream than it was trained on, so its projections are no longer the right ones for what they read.
The layers are walked once, original and converted model side by side. n is a module's norm, x the stream it reads, z what enters its
output projection:

    inputs (q, k, v, gate, up)    W' minimises |W' n(x_converted) - W n(x_original)|^2
    outputs (o, down)             W' minimises |W' z_converted - (original stream after the module - converted one before it)|^2

each with a ridge towards W, which is chosen on rows that are held out. The output projections also take up what the layers below
got wrong. Only sums over the tokens are kept, and only of the module at hand: of n(x)^T n(x) and n(x_original)^T n(x) for all inputs
of a module, as W' = W M with the same M.
Tensor-parallel ranks share the tokens: their sums are all-reduced, and what enters an output projection is gathered first.
"""

from __future__ import annotations

import copy
import math
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
from ..models.finite import NonFiniteError, cast_finite
from ..models.hf import decoder_layers, rewire
from .probe import inputs_of_layers

RIDGES = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0)  # of the mean of the diagonal of x^T x
BATCH = 8  # rows
HELD_OUT = 4  # of so many rows one
LOCAL = Reducer()  # of what is reduced already

Found = dict[str, Tensor]  # of a layer: its output projections by name, and ``MODULE.inputs``, the M of its input projections


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

    def __init__(self, reducer: Reducer = LOCAL) -> None:
        self.fit, self.held_out = Sums(), Sums()
        self.reducer = reducer
        self.singular = False  # whether a ridge had to be raised

    def add(self, x: Tensor, y: Tensor) -> None:
        """A batch of rows; batches have a multiple of HELD_OUT, but for the last. Ranks share the tokens."""
        held_out = torch.arange(len(x), device=x.device) % HELD_OUT == HELD_OUT - 1
        own = slice(self.reducer.rank, None, self.reducer.size)
        self.fit.add(x[~held_out, own], y[~held_out, own])
        self.held_out.add(x[held_out, own], y[held_out, own])

    def solve(self, prior: Tensor, where: str) -> Tensor | None:
        """None: it stays. ``where``: the module that asks, for an error."""
        prior = prior.double()
        for sums in (self.fit, self.held_out):
            sums.gram, sums.cross = (self.reducer.start(part).wait() for part in (sums.gram, sums.cross))
        gram, cross = self.held_out.gram, self.held_out.cross
        mean = float((self.fit.gram + gram).diagonal().mean())
        if not math.isfinite(mean):
            raise NonFiniteError(f"{where}: what it reads on the calibration text is NaN or infinite")
        if mean == 0:
            return None

        def error(weight: Tensor) -> float:  # up to a constant
            return float(((weight @ gram - 2 * cross) * weight).sum())

        errors = [error(prior), *(error(self._ridge(self.fit.gram, self.fit.cross, prior, ridge)) for ridge in RIDGES)]
        # Rank 0 chooses for all: unlike processors may round a near tie apart.
        choice = torch.tensor(float(errors.index(min(errors)) if self.reducer.rank == 0 else 0))
        best = int(self.reducer.start(choice).wait())
        return self._ridge(self.fit.gram + gram, self.fit.cross + cross, prior, RIDGES[best - 1]) if best else None

    def _ridge(self, gram: Tensor, cross: Tensor, prior: Tensor, ridge: float) -> Tensor:
        weight, raised = ridge_regression(gram, cross, prior, ridge)
        self.singular |= raised
        return weight


def ridge_regression(gram: Tensor, cross: Tensor, prior: Tensor, ridge: float) -> tuple[Tensor, bool]:
    """W, and whether the ridge had to be raised because rounding leaves no positive definite matrix with this one."""
    penalty = ridge * float(gram.diagonal().mean())
    eye = torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    factor, failed = torch.linalg.cholesky_ex(gram + penalty * eye)
    raised = bool(failed)
    while failed:
        penalty *= 10
        factor, failed = torch.linalg.cholesky_ex(gram + penalty * eye)
    return torch.cholesky_solve((cross + penalty * prior).T, factor).T, raised


class Refit:
    """Walks the layers of ``model``, a standard model (or one rank's shards) whose weights become those of ``wiring``, as ``dtype``
    can hold them."""

    @torch.no_grad()
    def __init__(
        self, model: PreTrainedModel, wiring: Wiring, rows: Tensor, dtype: torch.dtype = torch.float32, *, outputs: bool = True
    ) -> None:
        self.family = family_of(model.config.to_dict())
        rewire(model, "standard")
        check_untied(model)
        self.model, self.wiring, self.layers, self.dtype = model, wiring, decoder_layers(model), dtype
        self.standard = Wiring.parse("standard", wiring.num_layers)
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

    def whole(self, kept: Any, read: Callable[[str], Tensor]) -> dict[str, Tensor]:
        """What has changed, not only this rank's shards, after ``run``, on rank 0; ``read`` gives an original weight."""
        found, whole = lru_cache(1)(kept.get), {}  # all ranks ask for a layer, one after the other
        for name, (layer, key) in self.changed.items():
            new = found(layer)[key]
            if self.reducer.rank == 0:
                whole[name] = new if name == key else mapped(read(name), new).to(self.dtype)
        return whole

    @torch.no_grad()
    def alone(self, advance: Callable[[], object] = lambda: None) -> list[nn.Module]:
        """Every layer of ``wiring`` as it would be were it the only one converted; the model's own stay as they are."""
        whole, found = self.wiring, list[nn.Module]()
        for index, layer in enumerate(self.layers):
            before = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
            self.wiring, self.converted = Wiring(whole.kind, (index,), whole.num_layers), list(self.original)
            self._layer(index, {})
            found.append(copy.deepcopy(layer))
            layer.load_state_dict(before)
            advance()
        self.wiring = whole
        return found

    def _layer(self, index: int, kept: Any) -> None:
        if index < self.wiring.layers[0]:  # both models are the same so far
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
        inputs, readers, key = Regression(self.reducer), list[nn.Linear](), f"{self.names[module]}.inputs"
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
            eye = torch.eye(x_original.shape[-1], device=x_original.device)
            self._keep(found, key, inputs, eye, torch.float32)
        if key in found:
            for linear in readers:
                self._change(linear, mapped(linear.weight, found[key]), index, key)
        key = f"{self.names[output]}.weight"
        if fit and self.outputs:
            self._outputs(index, is_mlp, module, found, key)
        if key in found:
            width = output.weight.shape[1]  # of this rank's shard
            self._change(output, found[key][:, self.reducer.rank * width :][:, :width], index, key)
        self.converted = [self._next(self.wiring, index, is_mlp, batch, state) for batch, state in enumerate(self.converted)]

    def _outputs(self, index: int, is_mlp: bool, module: nn.Module, found: Found, key: str) -> None:
        outputs = Regression(self.reducer)
        layer: Any = self.layers[index]
        scale = getattr(layer, self.family.multiplier) if self.family.multiplier else 1.0
        for batch, state in enumerate(self.converted):
            with linear_calls(module) as calls:
                self._next(self.wiring, index, is_mlp, batch, state)
            linear, z = calls[-1]
            missing = finalize(self.original[batch], LOCAL) - finalize(state, LOCAL)
            outputs.add(self.reducer.gather(z), missing / scale - (0 if linear.bias is None else linear.bias))
        self._keep(found, key, outputs, self.reducer.gather(linear.weight.detach()), self.dtype)

    def _keep(self, found: Found, key: str, regression: Regression, prior: Tensor, dtype: torch.dtype) -> None:
        weight = regression.solve(prior, key.rpartition(".")[0])
        if regression.singular:
            self.singular.append(key)
        if weight is not None:
            found[key] = cast_finite(key, weight, dtype)

    def _change(self, linear: nn.Linear, weight: Tensor, index: int, key: str) -> None:
        name = f"{self.names[linear]}.weight"
        linear.weight.copy_(cast_finite(name, weight, self.dtype))
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
