"""Loading checkpoints: each rank its shards, and what is wrong with a file in one line."""

import json
import resource
import sys

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from ladder_residual import rewire
from ladder_residual.models.families import FAMILIES
from ladder_residual.models.loading import load_model
from tests.ranks import run_on_ranks
from tests.tiny_models import FAMILY_NAMES, random_ids, tiny_model


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """A saved rewired model of every family, one of them in several files."""
    root = tmp_path_factory.mktemp("checkpoints")
    for family in FAMILY_NAMES:
        options = {"max_shard_size": "100KB"} if family == "llama" else {}
        rewire(tiny_model(family), "ladder:last-half").save_pretrained(root / family, **options)
    assert (root / "llama" / "model.safetensors.index.json").exists()
    return root


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_one_process_loads_what_transformers_loads(family, checkpoints):
    model = load_model(checkpoints / family)
    expected = rewire(tiny_model(family), "ladder:last-half")
    with torch.no_grad():
        torch.testing.assert_close(model(random_ids()).logits, expected(random_ids()).logits, rtol=1e-5, atol=1e-5)


def load_families(world, root):
    errors = {}
    for family in FAMILY_NAMES:
        if FAMILIES[family].refuse_tp:
            continue
        expected = rewire(tiny_model(family), "ladder:last-half")
        with torch.no_grad():
            found = load_model(f"{root}/{family}", world)(random_ids()).logits
            errors[family] = (found - expected(random_ids()).logits).abs().max().item()
    return errors


def test_ranks_load_their_shards(checkpoints):
    for errors in run_on_ranks(2, load_families, str(checkpoints)):
        assert max(errors.values()) < 1e-4, errors


def load_different(world, plain, other, wiring):
    messages = []
    for source, spec in ((other, None), (plain, wiring)):
        try:
            load_model(source if world.rank == 1 else plain, world, wiring=spec if world.rank == 1 else None)
        except ValueError as error:
            messages.append(str(error))
    return messages


def test_ranks_that_differ_are_found_at_the_start(tmp_path):
    tiny_model("llama").save_pretrained(tmp_path / "plain")
    tiny_model("llama", seed=1).save_pretrained(tmp_path / "other")
    for messages in run_on_ranks(2, load_different, str(tmp_path / "plain"), str(tmp_path / "other"), "ladder"):
        assert ["the checkpoint of rank 1 on" in messages[0], "the config or wiring of rank 1 on" in messages[1]] == [
            True,
            True,
        ]


def rewrite_config(directory, **changes):
    config = json.loads((directory / "config.json").read_text()) | changes
    (directory / "config.json").write_text(json.dumps(config))


@pytest.fixture
def saved(tmp_path):
    rewire(tiny_model("llama"), "ladder").save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"num_hidden_layers": "four"}, "num_hidden_layers is 'four'"),
        ({"num_hidden_layers": 40}, "holds the weights of 4 layers, but its config.json calls for 40"),
        ({"num_hidden_layers": 99_999}, "holds the weights of 4 layers, but its config.json calls for 99999"),
        ({"hidden_size": 128}, "config.json calls for"),
        ({"vocab_size": 7}, "has shape"),
        ({"wiring": "ladder:40"}, "layer 40, but the model has 4 layers"),
        ({"wiring": 3}, "a wiring is a string"),
        ({"model_type": "ladder_bert"}, "unknown family"),
        ({"quantization_config": {"bits": 4}}, "quant_method is None; supported: fp8 of"),
        ({"num_hidden_layers": 3, "wiring": "ladder"}, "holds the weights of 4 layers, but its config.json calls for 3"),
        ({"attention_bias": False}, "has no place for (model.layers.0.self_attn.k_proj.bias"),
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"hidden_act": "nope"}, "nope"),
        ({"rope_parameters": 5}, "rope_parameters"),
    ],
)
def test_configs_that_contradict_the_weights(saved, changes, named):
    rewrite_config(saved, **changes)
    with pytest.raises(ValueError, match=".*") as caught:
        load_model(saved)
    assert named in str(caught.value)


def test_auto_dtype_is_the_weights_own(saved):
    model = tiny_model("llama").to(torch.float16)
    model.save_pretrained(saved / "half")
    rewrite_config(saved / "half", dtype=None)
    assert load_model(saved / "half").dtype == torch.float16


def save_sharded(world, directory):
    model = load_model(directory, world)
    try:
        model.save_pretrained(directory + "/again")
    except ValueError as error:
        return str(error)


def test_one_ranks_shards_are_not_saved_as_a_checkpoint(saved):
    assert all("one rank's shards" in message for message in run_on_ranks(2, save_sharded, str(saved)))
    assert not (saved / "again").exists()


def test_a_tensor_is_missing(saved):
    tensors = load_file(saved / "model.safetensors")
    del tensors["model.layers.2.mlp.up_proj.weight"]
    save_file(tensors, saved / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"no tensor model\.layers\.2\.mlp\.up_proj\.weight"):
        load_model(saved)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.dictionaries(
        st.sampled_from(
            ["hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size", "wiring", "head_dim"]
        )
        | st.sampled_from(
            ["model_type", "vocab_size", "num_hidden_layers", "rms_norm_eps", "ladder_layers", "dtype", "hidden_act"]
        ),
        st.none()
        | st.integers(-5, 300)
        | st.text(max_size=8)
        | st.floats(allow_nan=False)
        | st.lists(st.integers(), max_size=2),
        min_size=1,
        max_size=3,
    )
)
def test_malformed_configs_are_value_errors(saved, changes):
    original = (saved / "config.json").read_text()
    try:
        rewrite_config(saved, **changes)
        try:
            load_model(saved)
        except ValueError as error:
            assert str(error)
    finally:
        (saved / "config.json").write_text(original)


def load_and_measure(world, directory):
    base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    model = load_model(directory, world)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return (peak - base) * 1024, sum(p.numel() * p.element_size() for p in model.parameters())


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss is in kilobytes on Linux only")
def test_peak_memory_is_the_ranks_share(tmp_path):
    """A checkpoint of some 300 MB on two ranks: neither ever holds much more than its half."""
    model = tiny_model(
        "llama", hidden_size=1024, intermediate_size=4096, num_hidden_layers=4, num_attention_heads=16, vocab_size=16384
    )
    model.save_pretrained(tmp_path)
    size = (tmp_path / "model.safetensors").stat().st_size
    assert size > 250 * 2**20
    del model
    for grew, held in run_on_ranks(2, load_and_measure, tmp_path):
        assert held < 0.55 * size
        # One matrix read whole (a shard of columns touches all of its pages) and the reader's window come on top.
        assert grew < held + 0.25 * size, (grew, held, size)
