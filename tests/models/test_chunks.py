"""Sharded by tensor parallelism, then by FSDP: the chunks of all ranks make up the whole, each number as often as they say."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from ladder_residual.models.chunks import local_chunks, local_part
from ladder_residual.models.presets import ModelShape
from ladder_residual.models.sharding import rank_heads, shard_of

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
def test_chunks_make_up_the_whole(case):
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
        spec = shard_of(f"{name}.weight", whole.shape, shape, tp, rank) if tp > 1 else None
        local = local_part(whole, spec)
        row = 0
        for shard in local.chunk(dp) if len(local) else ():  # as FSDP shards: the last ones may be shorter, or missing
            chunks = local_chunks(row, tuple(shard.shape), spec, tp)
            assert sum(torch.Size(chunk.size).numel() for chunk in chunks) == shard.numel()
            for chunk in chunks:
                place = tuple(slice(start, start + length) for start, length in zip(chunk.whole, chunk.size, strict=True))
                rebuilt[place] = chunk.of(shard)
                counted[place] += 1 / chunk.copies
            row += len(shard)
    assert torch.equal(rebuilt, whole)
    assert torch.allclose(counted, torch.ones_like(whole))  # so a norm over all ranks counts every number once
    assert rank_heads(shape, tp, 0).copies == max(1, tp // kv)
