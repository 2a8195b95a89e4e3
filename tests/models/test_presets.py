"""Published shapes."""

import pytest

from ladder_residual.models.presets import ModelShape, presets


def test_presets_count_the_parameters_they_are_named_for():
    published = {
        "llama-3.2-1b": 1_235_814_400,
        "llama-3.2-3b": 3_212_749_824,
        "llama-3.1-8b": 8_030_261_248,
        "llama-3-70b": 70_553_706_496,
        "llama-2-7b": 6_738_415_616,
        "llama-2-13b": 13_015_864_320,
    }
    assert {name: ModelShape.from_name(name).parameters for name in published} == published
    for shape in presets().values():
        assert shape.num_heads % shape.num_kv_heads == 0
    with pytest.raises(ValueError, match=r"did you mean 'llama-3\.1-8b'"):
        ModelShape.from_name("llama-31-8b")
    with pytest.raises(ValueError, match="lacks hidden_size"):
        ModelShape.from_hf({"model_type": "llama"})
