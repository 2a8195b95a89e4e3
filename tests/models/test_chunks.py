"""Cut by tensor parallelism, then by FSDP: the pieces of all ranks make up the whole, each number as often as they say."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from ladder_residual.pieces import blocks
from ladder_residual.presets import ModelShape
from ladder_residual.sharding import cut_of, rank_heads

NAMES = ("q_proj", "k_proj", "o_proj", "qkv_proj", "gate_up_proj", "up_proj", "down_proj", "embed_tokens", "input_layernorm")


@st.composite
def cases(draw):
    kv = draw(st.sampled_from([1, 2, 4]))
    tp = draw(st.sampled_from([1, 2, 4]))
    heads = kv * draw(st.sampled_from([1, 2])) * tp
    return (
        draw(st.sampled_from(NAMES)),
        tp,
        draw(st.integers(1, 5)),
        heads,
        kv,
        draw(st.integers(1, 3)),
        draw(st.integers(1, 9)),
    )


@given(cases())
def test_pieces_make_up_the_whole(case):
    name, tp, dp, heads, kv, dim, neurons = case
    hidden, columns = 8, neurons * tp
    shape = ModelShape(
        family="llama",
        hidden_size=hidden,
        intermediate_size=columns,
        num_layers=1,
        num_heads=heads,
        num_kv_heads=kv,
        head_dim=dim,
        vocab_size=37,
    )
    sizes = {
        "q_proj": (heads * dim, hidden),
        "k_proj": (kv * dim, hidden),
        "o_proj": (hidden, heads * dim),
        "qkv_proj": ((heads + 2 * kv) * dim, hidden),
        "gate_up_proj": (2 * columns, hidden),
        "up_proj": (columns, hidden),
        "down_proj": (hidden, columns),
        "embed_tokens": (37, hidden),
        "input_layernorm": (hidden,),
    }
    whole = torch.arange(1.0, torch.Size(sizes[name]).numel() + 1).reshape(sizes[name])
    rebuilt, counted = torch.zeros_like(whole), torch.zeros_like(whole)
    for rank in range(tp):
        cut = cut_of(f"{name}.weight", whole.shape, shape, tp, rank) if tp > 1 else None
        local = whole
        if cut is not None:
            local = torch.cat([whole.narrow(cut.dim, a, b - a) for a, b in cut.ranges], cut.dim)
        row = 0
        for shard in local.chunk(dp) if len(local) else ():  # as FSDP cuts: the last ones may be shorter, or missing
            pieces = blocks(row, tuple(shard.shape), cut, tp)
            assert sum(torch.Size(piece.size).numel() for piece in pieces) == shard.numel()
            for piece in pieces:
                place = tuple(slice(start, start + length) for start, length in zip(piece.whole, piece.size, strict=True))
                rebuilt[place] = piece.of(shard)
                counted[place] += 1 / piece.copies
            row += len(shard)
    assert torch.equal(rebuilt, whole)
    assert torch.allclose(counted, torch.ones_like(whole))  # so a norm over all ranks counts every number once
    assert rank_heads(shape, tp, 0).copies == max(1, tp // kv)
