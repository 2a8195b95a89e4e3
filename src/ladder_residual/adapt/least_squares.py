"""Least squares from sums over tokens, with a ridge that is chosen on rows held out."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ..core.reduce import Reducer
from ..models.finite import NonFiniteError

RIDGES = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0)  # of the mean of the diagonal of x^T x
HELD_OUT = 4  # of so many rows one
LOCAL = Reducer()  # of what is reduced already


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

    @property
    def gram(self) -> Tensor:
        """Of all rows, and after ``solve`` of all ranks."""
        return self.fit.gram + self.held_out.gram

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
