"""The same step in plain float32 PyTorch, every rank in one process, to be read next to the recurrences of ``core/wiring.py``.

``streams`` holds one residual stream per rank. An all-reduce adds the ranks' tensors. Nothing is fused, and caches are plain tensors that
grow by concatenation. Every kernel and every schedule is compared with it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ladder_residual.core.config import Wiring
from ladder_residual.engine.cache import to_fp8
from ladder_residual.engine.rope import rope_tables, rotate
from ladder_residual.engine.spec import EngineSpec, RankSizes
from ladder_residual.engine.weights import LayerWeights, RankWeights


class ReferenceDecoder:
    """``ranks``: the shards present. With fewer than ``tp`` of them an all-reduce adds those present: one shard alone is exactly
    what an emulated rank computes. With an ``fp8_cache`` keys and values are rounded as that holds them."""

    def __init__(
        self, spec: EngineSpec, wiring: Wiring, ranks: Sequence[RankWeights], *, tp: int, first_rank: int = 0, fp8_cache: bool = False
    ) -> None:  # fmt: skip
        self.fp8_cache = fp8_cache
        self.spec, self.wiring, self.tp = spec, wiring, tp
        self.ranks = [_in_float32(rank) for rank in ranks]
        self.sizes = [RankSizes.of(spec.shape, tp, first_rank + i) for i in range(len(ranks))]
        self.caches: list[list[tuple[Tensor, Tensor] | None]] = [[None] * spec.shape.num_layers for _ in ranks]
        self.length = 0

    def forward(self, tokens: Tensor) -> Tensor:
        """(B, S) new tokens after those already seen -> logits (B, S, vocabulary rows of the ranks present)."""
        device = self.ranks[0].device
        tokens = tokens.to(device)
        positions = torch.arange(self.length, self.length + tokens.shape[1], device=device)
        cos, sin = (table[positions] for table in rope_tables(self.spec, int(positions[-1]) + 1, device))
        x0 = self._all_reduce([_embed(w, s, tokens) for w, s in zip(self.ranks, self.sizes, strict=True)])
        streams = self._chain(x0, cos, sin)
        self.length += tokens.shape[1]
        return torch.cat(
            [_rms(x, w.final_norm, self.spec.norm_eps) @ w.head.T for x, w in zip(streams, self.ranks, strict=True)], -1
        )

    def _chain(self, x0: list[Tensor], cos: Tensor, sin: Tensor) -> list[Tensor]:
        """x_i for every module i, literally: the history is kept, and each wiring says which x_j a module reads."""
        wiring, tp = self.wiring, self.tp
        xs = [x0]  # xs[i][rank] = x_i
        late: list[list[Tensor]] = []  # delayed: what the others add to each rank's stream, not yet arrived
        diverged = False
        i = 0
        for layer in range(self.spec.shape.num_layers):
            kind = wiring.kind_of(layer)
            if kind != "delayed":
                xs[-1], late = _arrive(xs[-1], late, 0)
            if diverged and kind not in ("desync", "no-comm"):
                xs[-1], diverged = self._all_reduce([x / tp for x in xs[-1]]), False
            if kind == "parallel":
                x = xs[-1]
                attn = self._partials("attention", layer, x, cos, sin)
                mlp = self._partials("mlp", layer, x, cos, sin, uses_input_norm=True)
                both = self._all_reduce([a + m for a, m in zip(attn, mlp, strict=True)])
                new = [a + b for a, b in zip(x, both, strict=True)]
                # an MLP two modules on that is a ladder would read x before this layer's single all-reduce
                xs += [x, new]
                i += 2
                continue
            for module in ("attention", "mlp"):
                i += 1
                x = xs[-1]
                if kind == "ladder":
                    read = xs[max(i - 2, 0)]
                    partial = self._partials(module, layer, read, cos, sin)
                    xs.append([a + b for a, b in zip(x, self._all_reduce(partial), strict=True)])
                elif kind == "standard":
                    partial = self._partials(module, layer, x, cos, sin)
                    xs.append([a + b for a, b in zip(x, self._all_reduce(partial), strict=True)])
                elif kind == "desync" and i % wiring.step == 0:
                    partial = self._partials(module, layer, x, cos, sin)
                    xs.append(self._all_reduce([p + a / tp for p, a in zip(partial, x, strict=True)]))
                    diverged = False
                elif kind == "delayed":
                    x, late = _arrive(x, late, wiring.step)
                    partial = self._partials(module, layer, x, cos, sin)
                    late = [*late, [total - own for total, own in zip(self._all_reduce(partial), partial, strict=True)]]
                    xs.append([a + p for a, p in zip(x, partial, strict=True)])
                else:  # desync between all-reduces, no-comm
                    partial = self._partials(module, layer, x, cos, sin)
                    xs.append([a + p for a, p in zip(x, partial, strict=True)])
                    diverged = diverged or kind == "desync"
        if diverged:
            return self._all_reduce([x / tp for x in xs[-1]])
        return _arrive(xs[-1], late, 0)[0]

    def _all_reduce(self, partials: Sequence[Tensor]) -> list[Tensor]:
        total = torch.stack(list(partials)).sum(0)
        return [total for _ in partials]

    def _partials(
        self, module: str, layer: int, x: Sequence[Tensor], cos: Tensor, sin: Tensor, *, uses_input_norm: bool = False
    ) -> list[Tensor]:
        made = []
        for rank, (weights, sizes) in enumerate(zip(self.ranks, self.sizes, strict=True)):
            w = weights.layers[layer]
            if module == "attention":
                y = _rms(x[rank], w.input_norm, self.spec.norm_eps)
                out, cache = _attention(self.spec, sizes, w, y, cos, sin, self.caches[rank][layer], self.fp8_cache)
                self.caches[rank][layer] = cache
            else:
                y = _rms(x[rank], w.input_norm if uses_input_norm else w.post_attention_norm, self.spec.norm_eps)
                gate, up = (y @ w.gate_up.T).chunk(2, dim=-1)
                out = (torch.nn.functional.silu(gate) * up) @ w.down.T
            made.append(out)
        return made


def _arrive(streams: list[Tensor], late: list[list[Tensor]], keep: int) -> tuple[list[Tensor], list[list[Tensor]]]:
    """All but the ``keep`` latest contributions of the other ranks join the streams."""
    due = late[: max(0, len(late) - keep)]
    for others in due:
        streams = [a + b for a, b in zip(streams, others, strict=True)]
    return streams, late[len(due) :]


def _rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def _in_float32(weights: RankWeights) -> RankWeights:
    def up(value: Tensor | None) -> Tensor | None:
        return None if value is None else value.float()

    layers = tuple(LayerWeights(**{name: up(value) for name, value in vars(layer).items()}) for layer in weights.layers)
    return RankWeights(up(weights.embedding), layers, up(weights.final_norm), up(weights.head))


def _embed(weights: RankWeights, sizes: RankSizes, tokens: Tensor) -> Tensor:
    local = tokens - sizes.vocab_first
    mine = (local >= 0) & (local < sizes.vocab_rows)
    return weights.embedding[local.clamp(0, sizes.vocab_rows - 1)] * mine.unsqueeze(-1)


def _attention(
    spec: EngineSpec,
    sizes: RankSizes,
    w: LayerWeights,
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    cache: tuple[Tensor, Tensor] | None,
    fp8_cache: bool,
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    batch, steps, _ = x.shape
    d = sizes.head_dim
    qkv = x @ w.qkv.T
    if w.qkv_bias is not None:
        qkv = qkv + w.qkv_bias
    heads = qkv.view(batch, steps, -1, d).transpose(1, 2)  # (B, heads + 2 kv, S, D)
    q, k, v = heads.split([sizes.heads, sizes.kv_heads, sizes.kv_heads], dim=1)
    if w.q_norm is not None and w.k_norm is not None:
        q, k = _rms(q, w.q_norm, spec.norm_eps), _rms(k, w.k_norm, spec.norm_eps)
    q, k = rotate(q, cos, sin), rotate(k, cos, sin)
    if fp8_cache:
        k, v = (numbers.float() * scales.float().unsqueeze(-1) for numbers, scales in map(to_fp8, (k, v)))
    if cache is not None:
        k, v = torch.cat([cache[0], k], dim=2), torch.cat([cache[1], v], dim=2)
    expand = (k.repeat_interleave(sizes.group, 1), v.repeat_interleave(sizes.group, 1))
    scores = q @ expand[0].transpose(-1, -2) * d**-0.5
    seen = (
        torch.arange(k.shape[2], device=x.device)[None, :]
        <= torch.arange(k.shape[2] - steps, k.shape[2], device=x.device)[:, None]
    )
    out = scores.masked_fill(~seen, float("-inf")).softmax(-1) @ expand[1]
    return out.transpose(1, 2).reshape(batch, steps, -1) @ w.output.T, (k, v)
