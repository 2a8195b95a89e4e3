"""Which part of every parameter a rank holds: arithmetic on names and shapes, nothing is loaded or moved here.

A ``ShardSpec`` is a dim and the ranges kept along it. Projections *into* heads or neurons are sharded by output rows, projections
*out of* them by input columns, the vocabulary by rows; everything else (norms, routers) is replicated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .families import Family
from .presets import ModelShape


@dataclass(frozen=True)
class ShardSpec:
    """Keep ``ranges`` of ``dim``. ``copies``, one per range: how many neighbouring ranks hold it alike (replicated KV heads)."""

    dim: int
    ranges: tuple[tuple[int, int], ...]
    copies: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "copies", self.copies or (1,) * len(self.ranges))

    @property
    def length(self) -> int:
        return sum(stop - start for start, stop in self.ranges)

    def local_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        return (*shape[: self.dim], self.length, *shape[self.dim + 1 :])


def split(total: int, parts: int, index: int) -> tuple[int, int]:
    """The ``index``-th of ``parts`` nearly equal ranges; the first ones are one longer if ``total`` does not divide."""
    base, extra = divmod(total, parts)
    start = index * base + min(index, extra)
    return start, start + base + (index < extra)


@dataclass(frozen=True)
class RankHeads:
    """Which query and KV heads a rank computes."""

    query: tuple[int, int]
    kv: tuple[int, int]
    copies: int  # ranks that hold the same KV heads

    @property
    def groups(self) -> int:
        """Query heads per KV head on this rank."""
        return (self.query[1] - self.query[0]) // (self.kv[1] - self.kv[0])


def rank_heads(shape: ModelShape, tp: int, rank: int) -> RankHeads:
    heads, kv = shape.num_heads, shape.num_kv_heads
    if kv >= tp:
        first, last = split(kv, tp, rank)
        per_kv = heads // kv
        return RankHeads((first * per_kv, last * per_kv), (first, last), 1)
    copies = tp // kv
    first = rank // copies
    return RankHeads(split(heads, tp, rank), (first, first + 1), copies)


def check_divides(shape: ModelShape, family: Family | None, tp: int, uneven: bool | None = False) -> None:
    """ValueError with the numbers if ``tp`` ranks cannot share the model. ``uneven``: ranks may have unequal numbers of heads; None:
    they cannot, and the message does not offer it. ``family``: None if it is not one of ours (the planner)."""
    if tp < 1:
        raise ValueError(f"tp must be at least 1, got {tp}")
    if tp == 1:
        return
    if family is not None and family.refuse_tp:
        raise ValueError(f"{family.model_type} cannot be tensor-parallel: {family.refuse_tp}; run it with tp=1")
    heads, kv = shape.num_heads, shape.num_kv_heads
    if heads % kv:
        raise ValueError(f"{heads} query heads are not a multiple of {kv} KV heads")
    if tp > heads:
        raise ValueError(f"tp={tp} is more than the model's {heads} attention heads; use at most {heads}")
    even = heads % tp == 0 and (kv % tp == 0 or tp % kv == 0)
    fitting = [
        n for n in range(1, heads + 1) if heads % n == 0 and (kv % n == 0 or n % kv == 0) and shape.intermediate_size % n == 0
    ]
    if not even and not (uneven and kv >= tp):
        offer = uneven is not None and kv >= tp
        way_out = f"use tp in {fitting}" + (", or allow ranks with unequal numbers of heads (--uneven)" if offer else "")
        raise ValueError(f"tp={tp} does not divide {heads} query heads with {kv} KV heads evenly: {way_out}")
    if shape.intermediate_size % tp and not uneven:
        way_out = f"use tp in {fitting}" + (", or allow unequal ranks (--uneven)" if uneven is not None else "")
        raise ValueError(f"tp={tp} does not divide the MLP's {shape.intermediate_size} neurons; {way_out}")


_QUERY_ROWS = ("q_proj",)
_KV_ROWS = ("k_proj", "v_proj")
_HEAD_COLUMNS = ("o_proj", "dense")
_NEURON_ROWS = ("gate_proj", "up_proj", "c_fc", "dense_h_to_4h", "w1", "w3")  # w1 to w3: the experts of Mixtral's checkpoints
_NEURON_COLUMNS = ("down_proj", "c_proj", "dense_4h_to_h", "w2")
_VOCABULARY = ("embed_tokens", "embed_in", "lm_head", "embed_out")
_FUSED_ROWS = ("qkv_proj", "query_key_value", "gate_up_proj")
ROW_PARALLEL = (*_HEAD_COLUMNS, *_NEURON_COLUMNS)  # one rank adds their bias, or the all-reduce would add it once per rank
_PROJECTIONS = {*_QUERY_ROWS, *_KV_ROWS, *_FUSED_ROWS, *_NEURON_ROWS, *ROW_PARALLEL}


def is_projection(name: str) -> bool:
    """Whether it is the matrix of a projection of attention, an MLP or an expert: all but vocabulary, norms and routers."""
    module, _, kind = name.rpartition(".")
    return kind == "weight" and module.rpartition(".")[2] in _PROJECTIONS


def shard_of(name: str, shape: Sequence[int], model: ModelShape, tp: int, rank: int) -> ShardSpec | None:
    """What ``rank`` keeps of the parameter ``name`` of global ``shape``; None: all of it."""
    parts = name.split(".")
    kind = parts[-1]
    module = parts[-2] if kind in ("weight", "bias") else kind
    heads = rank_heads(model, tp, rank)
    dim = model.head_dim

    def rows(ranges: list[tuple[int, int]], *copies: int) -> ShardSpec:
        return ShardSpec(0, tuple(ranges), copies)

    def scaled(span: tuple[int, int], size: int, offset: int = 0) -> tuple[int, int]:
        return offset + span[0] * size, offset + span[1] * size

    def gate_and_up(total: int) -> tuple[tuple[int, int], tuple[int, int]]:
        keep = split(total // 2, tp, rank)
        return keep, scaled(keep, 1, total // 2)

    if "experts" in parts and len(shape) == 3:  # stacked: [expert, 2 * neurons, in], [expert, out, neurons]
        return ShardSpec(2, (split(shape[2], tp, rank),)) if module == "down_proj" else ShardSpec(1, gate_and_up(shape[1]))
    if module in _QUERY_ROWS:
        return rows([scaled(heads.query, dim)])
    if module in _KV_ROWS:
        return rows([scaled(heads.kv, dim)], heads.copies)
    if module == "qkv_proj":  # query rows, then key rows, then value rows
        key = model.num_heads * dim
        value = key + model.num_kv_heads * dim
        ranges = [scaled(heads.query, dim), scaled(heads.kv, dim, key), scaled(heads.kv, dim, value)]
        return rows(ranges, 1, heads.copies, heads.copies)
    if module == "query_key_value":  # head by head, each its query, key and value rows
        return rows([scaled(heads.query, 3 * dim)])
    if module == "gate_up_proj":
        return ShardSpec(0, gate_and_up(shape[0]))
    if module in _NEURON_ROWS or module in _VOCABULARY:
        return rows([split(shape[0], tp, rank)])
    if kind == "weight" and module in _HEAD_COLUMNS:
        return ShardSpec(1, (scaled(heads.query, dim),))
    if kind == "weight" and module in _NEURON_COLUMNS:
        return ShardSpec(1, (split(shape[1], tp, rank),))
    return None
