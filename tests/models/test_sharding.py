"""The shards of all ranks make up the whole."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ladder_residual.models.families import FAMILIES
from ladder_residual.models.presets import ModelShape
from ladder_residual.models.sharding import check_divides, shard_of
from tests.tiny_models import tiny_config


def test_families_with_wide_norms_refuse_ranks():
    shape = ModelShape.from_hf(tiny_config("olmo2").to_dict())
    with pytest.raises(ValueError, match="spans all heads"):
        check_divides(shape, FAMILIES["olmo2"], 2)


@given(st.integers(1, 8), st.integers(1, 8), st.integers(1, 4), st.sampled_from([1, 2, 3, 4, 8]))
def test_the_ranks_parts_make_the_whole(kv, per_kv, width, tp):
    heads = kv * per_kv
    shape = ModelShape(
        family="llama",
        hidden_size=32,
        intermediate_size=8 * width,
        num_layers=2,
        num_heads=heads,
        num_kv_heads=kv,
        head_dim=4,
        vocab_size=37,
    )
    try:
        check_divides(shape, FAMILIES["llama"], tp)
    except ValueError as error:
        assert str(tp) in str(error)
        return
    names = {
        "q_proj": (heads * 4, 32),
        "k_proj": (kv * 4, 32),
        "o_proj": (32, heads * 4),
        "qkv_proj": (heads * 4 + 2 * kv * 4, 32),
        "gate_up_proj": (16 * width, 32),
        "down_proj": (32, 8 * width),
        "lm_head": (37, 32),
    }
    for name, size in names.items():
        dim = 1 if name in ("o_proj", "down_proj") else 0
        times_kept = [0.0] * size[dim]
        for rank in range(tp):
            spec = shard_of(f"x.{name}.weight", size, shape, tp, rank)
            for (start, stop), copies in zip(spec.ranges, spec.copies, strict=True):
                for index in range(start, stop):
                    times_kept[index] += 1 / copies
        assert times_kept == pytest.approx([1.0] * size[dim]), name
