"""Modules of a decode step for several sequences: cuBLAS for the projections, small kernels between them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..cache import KVCache
from ..cuda.launcher import Launcher
from ..cuda.pdl import PdlMode
from ..quantized import Weight, dense
from ..residual_stream import ResidualStream
from ..schedule import Step
from ..spec import EngineSpec, RankSizes
from ..weights import RankWeights
from .gemv import embed_tokens
from .tiles import ceil_div, next_power_of_2, pick_kv_splits


def add_rms_norm(
    launch: Launcher, step: Step, stream: ResidualStream, added: Sequence[Tensor], norm: Tensor, out: Tensor, eps: float
) -> None:
    """Add outputs to the residual stream (stored unless the step is read-only); ``out`` gets it normed."""
    from ..kernels import elementwise

    rows, k = out.shape
    old, new = stream.advance(stores=step.stores_stream)
    outputs = [*added, *[norm] * (3 - len(added))]  # the unused ones are never read
    launch(
        elementwise.add_rms_norm, (rows,), old, *outputs, new, norm, out, eps,
        K=k, BLOCK_K=next_power_of_2(k), KEEP_STREAM=step.keeps_stream, NUM_ADDS=len(added), STORE_STREAM=step.stores_stream,
        num_warps=8,
    )  # fmt: skip


def silu_and_mul(launch: Launcher, gate_up: Tensor, out: Tensor) -> None:
    from ..kernels import elementwise

    rows, ff = out.shape
    launch(elementwise.silu_and_mul, (rows, ceil_div(ff, 1024)), gate_up, out, ff, BLOCK=1024, num_warps=4)


def add_to_partial(
    step: Step, stream: ResidualStream, partial: Tensor, attention_partial: Tensor | None, tp: int
) -> None:  # fmt: skip
    """What desync and parallel all-reduce beside the module's own partial."""
    if step.partial_adds_stream:
        partial.add_(stream.current, alpha=1.0 / tp)
    if attention_partial is not None:
        partial.add_(attention_partial)


class GemmOps:
    """Any batch."""

    split_k = 1  # of the QKV projection; attention adds the parts
    pdl_all_reduce = reads_before_wait = False

    def __init__(
        self, spec: EngineSpec, sizes: RankSizes, weights: RankWeights, cache: KVCache, *,
        pdl: PdlMode = PdlMode.TRIGGER_THEN_WAIT, kv_splits: int | None = None,
    ) -> None:  # fmt: skip
        from ..kernels import attention

        self._attention = attention
        self.spec, self.sizes, self.weights, self.cache = spec, sizes, weights, cache
        self.kv_splits = kv_splits or pick_kv_splits(sizes, cache.max_context, cache.batch)
        b, device, dtype = cache.batch, weights.device, weights.dtype
        self.launchers = [Launcher(pdl), Launcher(pdl)]

        def make(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.empty(*shape, dtype=dtype, device=device)

        self._normed = [make(b, sizes.hidden) for _ in range(2)]  # per chain: attention and MLP may run at the same time
        self._qkv = make(b, sizes.qkv_width)
        self._split = make(b, sizes.heads, self.kv_splits, sizes.head_dim)
        self._lse = make(b, sizes.heads, self.kv_splits, dtype=torch.float32)
        self._merged = make(b, sizes.heads * sizes.head_dim)
        self._gate_up = make(b, 2 * sizes.intermediate)
        self._act = make(b, sizes.intermediate)

    def embed(self, tokens: Tensor, partial: Tensor) -> None:
        embed_tokens(self.sizes, self.weights.embedding, tokens, partial)

    def qkv(self, step: Step, stream: ResidualStream, added: Sequence[Tensor]) -> None:
        w = self.weights.layers[step.layer]
        normed = self._add_norm(step, stream, added, w.input_norm)
        self._project(self.launchers[step.chain], normed, w.qkv, self._qkv)

    def attend(self, step: Step, launch: Launcher) -> None:
        s, w, cache, splits = self.sizes, self.weights.layers[step.layer], self.cache, self.kv_splits
        none = self._lse  # never read
        launch(
            self._attention.decode_attention, (cache.batch, s.kv_heads, splits),
            self._qkv, none, none if w.qkv_bias is None else w.qkv_bias, none if w.q_norm is None else w.q_norm,
            none if w.k_norm is None else w.k_norm, cache.cos, cache.sin, cache.positions, *cache.layer(step.layer),
            self._split, self._lse, cache.max_context, s.head_dim**-0.5, self.spec.norm_eps, s.hidden,
            KV_HEADS=s.kv_heads, GROUP=s.group, GROUP_PAD=max(16, next_power_of_2(s.group)), DIM=s.head_dim, BLOCK_KV=64,
            KV_SPLITS=splits, SPLIT_K=self.split_k, NORMED=True, BIAS=w.qkv_bias is not None, HEAD_NORM=w.q_norm is not None,
            num_warps=4,
        )  # fmt: skip
        if splits > 1:
            launch(
                self._attention.merge_splits, (cache.batch * s.heads,), self._split, self._lse, self._merged, KV_SPLITS=splits,
                KV_SPLITS_PAD=next_power_of_2(splits), DIM=s.head_dim, num_warps=1 if splits <= 8 else 4,
            )  # fmt: skip

    def out_proj(self, step: Step, launch: Launcher, stream: ResidualStream, partial: Tensor) -> None:
        attended = self._split.view(self._merged.shape) if self.kv_splits == 1 else self._merged
        self._write_partial(step, launch, stream, attended, self.weights.layers[step.layer].output, partial, None)

    def gate_up(self, step: Step, stream: ResidualStream, added: Sequence[Tensor]) -> None:
        w = self.weights.layers[step.layer]
        normed = self._add_norm(step, stream, added, w.input_norm if step.uses_input_norm else w.post_attention_norm)
        self._gated(self.launchers[step.chain], normed, w.gate_up, self._act)

    def down(self, step: Step, stream: ResidualStream, partial: Tensor, attention_partial: Tensor | None) -> None:
        launch, weight = self.launchers[step.chain], self.weights.layers[step.layer].down
        self._write_partial(step, launch, stream, self._act, weight, partial, attention_partial)

    def head(self, step: Step, stream: ResidualStream, added: Sequence[Tensor], logits: Tensor) -> None:
        normed = self._add_norm(step, stream, added, self.weights.final_norm)
        self._project(self.launchers[step.chain], normed, self.weights.head, logits)

    def _add_norm(self, step: Step, stream: ResidualStream, added: Sequence[Tensor], norm: Tensor) -> Tensor:
        out = self._normed[step.chain]
        add_rms_norm(self.launchers[step.chain], step, stream, added, norm, out, self.spec.norm_eps)
        return out

    def _project(self, launch: Launcher, x: Tensor, weight: Weight, out: Tensor) -> None:
        torch.mm(x, dense(weight, x.dtype).T, out=out)
        launch.dependent = False  # cuBLAS does not trigger early: what follows is an ordinary launch

    def _gated(self, launch: Launcher, x: Tensor, gate_up: Weight, out: Tensor) -> None:
        self._project(launch, x, gate_up, self._gate_up)
        silu_and_mul(launch, self._gate_up, out)

    def _write_partial(
        self, step: Step, launch: Launcher, stream: ResidualStream, x: Tensor, weight: Weight, partial: Tensor,
        attention_partial: Tensor | None,
    ) -> None:  # fmt: skip
        self._project(launch, x, weight, partial)
        add_to_partial(step, stream, partial, attention_partial, self.sizes.tp)
