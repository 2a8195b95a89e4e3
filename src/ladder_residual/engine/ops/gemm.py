"""Modules of a decode step for several sequences: cuBLAS for the projections, small kernels between them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ._triton import triton
from .cache import KVCache
from .gemv_ops import embed_tokens, pick_splits
from .lane import Lane
from .launcher import Launcher
from .schedule import Step
from .spec import EngineSpec, RankSizes
from .weights import RankWeights


def absorb_norm(
    launch: Launcher, step: Step, lane: Lane, absorbed: Sequence[Tensor], norm: Tensor, out: Tensor, eps: float
) -> None:
    """The lane's stream takes up the outputs (unless the step stands aside); ``out`` gets it normed. A program a row."""
    from . import kernels_small

    rows, k = out.shape
    old, new = lane.advance(stores=step.stores_stream)
    deltas = [*absorbed, *[norm] * (3 - len(absorbed))]  # the unused ones are never read
    launch(
        kernels_small.absorb_norm, (rows,), old, *deltas, new, norm, out, eps,
        K=k, BLOCK_K=triton.next_power_of_2(k), KEEP=step.keeps_stream, DELTAS=len(absorbed),
        STORES=step.stores_stream, warps=8,
    )  # fmt: skip


def silu_multiply(launch: Launcher, gate_up: Tensor, out: Tensor) -> None:
    from . import kernels_small

    rows, ff = out.shape
    launch(kernels_small.silu_multiply, (rows, triton.cdiv(ff, 1024)), gate_up, out, ff, BLOCK=1024, warps=4)


class GemmOps:
    """Any batch. The same contract as ``GemvOps``: absorb, compute, write the message."""

    slices = 1  # of the QKV product along K, which attention adds up
    early_sums = reads_before = False

    def __init__(
        self,
        spec: EngineSpec,
        sizes: RankSizes,
        weights: RankWeights,
        cache: KVCache,
        *,
        pdl: int = 1,
        splits: int | None = None,
    ) -> None:
        from . import kernels_attention

        self._attend = kernels_attention
        self.spec, self.sizes, self.weights, self.cache = spec, sizes, weights, cache
        self.splits = splits or pick_splits(sizes, cache.max_context, cache.batch)
        b, device, dtype = cache.batch, weights.device, weights.dtype
        self.launchers = [Launcher(pdl), Launcher(pdl)]

        def make(*shape: int, kind: torch.dtype = dtype) -> Tensor:
            return torch.empty(*shape, dtype=kind, device=device)

        # one set per lane: in two lanes attention and MLP run at the same time
        self._normed = [make(b, sizes.hidden) for _ in range(2)]
        self._qkv = make(b, sizes.qkv_width)
        self._split = make(b, sizes.heads, self.splits, sizes.head_dim)
        self._lse = make(b, sizes.heads, self.splits, kind=torch.float32)
        self._merged = make(b, sizes.heads * sizes.head_dim)
        self._gate_up = make(b, 2 * sizes.intermediate)
        self._act = make(b, sizes.intermediate)

    def embed(self, tokens: Tensor, message: Tensor) -> None:
        embed_tokens(self.sizes, self.weights.embedding, tokens, message)

    def qkv(self, step: Step, lane: Lane, absorbed: Sequence[Tensor]) -> None:
        w = self.weights.layers[step.layer]
        normed = self._absorb_norm(step, lane, absorbed, w.first_norm)
        self._project(self.launchers[step.lane], normed, w.qkv, self._qkv)

    def attend(self, step: Step, launch: Launcher) -> None:
        s, w, cache = self.sizes, self.weights.layers[step.layer], self.cache
        none = self._lse
        launch(
            self._attend.decode_attention, (cache.batch, s.kv_heads, self.splits),
            self._qkv, none, none if w.qkv_bias is None else w.qkv_bias, none if w.q_norm is None else w.q_norm,
            none if w.k_norm is None else w.k_norm, cache.cos, cache.sin, cache.positions, cache.keys[step.layer],
            cache.values[step.layer], self._split, self._lse, cache.max_context, s.head_dim**-0.5, self.spec.norm_eps, s.hidden,
            KV_HEADS=s.kv_heads, GROUP=s.group, GROUP_PAD=max(16, triton.next_power_of_2(s.group)), DIM=s.head_dim, BLOCK_T=64,
            SPLITS=self.splits, SLICES=self.slices, NORMED=True, BIAS=w.qkv_bias is not None, HEAD_NORM=w.q_norm is not None, warps=4,
        )  # fmt: skip
        if self.splits > 1:
            launch(
                self._attend.merge_splits, (cache.batch * s.heads,), self._split, self._lse, self._merged, SPLITS=self.splits,
                SPLITS_PAD=triton.next_power_of_2(self.splits), DIM=s.head_dim, warps=1 if self.splits <= 8 else 4,
            )  # fmt: skip

    def output(self, step: Step, launch: Launcher, lane: Lane, message: Tensor) -> None:
        merged = self._split.view(self._merged.shape) if self.splits == 1 else self._merged
        self._output(step, launch, lane, merged, self.weights.layers[step.layer].output, message, None)

    def gate_up(self, step: Step, lane: Lane, absorbed: Sequence[Tensor]) -> None:
        w = self.weights.layers[step.layer]
        normed = self._absorb_norm(step, lane, absorbed, w.first_norm if step.first_norm else w.second_norm)
        self._gated(self.launchers[step.lane], normed, w.gate_up, self._act)

    def down(self, step: Step, lane: Lane, message: Tensor, other: Tensor | None) -> None:
        self._output(step, self.launchers[step.lane], lane, self._act, self.weights.layers[step.layer].down, message, other)

    def head(self, step: Step, lane: Lane, absorbed: Sequence[Tensor], logits: Tensor) -> None:
        normed = self._absorb_norm(step, lane, absorbed, self.weights.final_norm)
        self._project(self.launchers[step.lane], normed, self.weights.head, logits)

    def _absorb_norm(self, step: Step, lane: Lane, absorbed: Sequence[Tensor], norm: Tensor) -> Tensor:
        out = self._normed[step.lane]
        absorb_norm(self.launchers[step.lane], step, lane, absorbed, norm, out, self.spec.norm_eps)
        return out

    def _project(self, launch: Launcher, x: Tensor, weight: Tensor, out: Tensor) -> None:
        torch.mm(x, weight.T, out=out)
        launch.dependent = False  # cuBLAS does not signal early: what follows is an ordinary launch

    def _gated(self, launch: Launcher, x: Tensor, gate_up: Tensor, out: Tensor) -> None:
        self._project(launch, x, gate_up, self._gate_up)
        silu_multiply(launch, self._gate_up, out)

    def _output(
        self, step: Step, launch: Launcher, lane: Lane, x: Tensor, weight: Tensor, message: Tensor, other: Tensor | None
    ) -> None:  # fmt: skip
        self._project(launch, x, weight, message)
        if step.adds_stream:
            message.add_(lane.stream, alpha=1.0 / self.sizes.tp)
        if other is not None:
            message.add_(other)
