"""Broken and hostile input: in this process with hypothesis, in worker processes as `ladder bench fuzz` does it."""

import json
import os
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ladder_residual.bench.fuzz.campaign import run_campaign
from ladder_residual.bench.fuzz.targets import TARGETS, Box
from ladder_residual.bench.fuzz.verdict import PACKAGE, is_meant
from ladder_residual.checkpoint import CONFIG_BYTES, read_json
from ladder_residual.generate import load_tokenizer
from ladder_residual.generation_settings import generation_config
from ladder_residual.loading import load_model


@pytest.fixture(scope="module")
def box(tmp_path_factory):
    return Box(tmp_path_factory.mktemp("fuzz"))


@pytest.mark.parametrize("name", sorted(set(TARGETS) - {"prompt", "generation config"}))
def test_every_kind_of_broken_input_is_accepted_or_refused(name, box):
    @settings(max_examples=12, suppress_health_check=list(HealthCheck), database=None)
    @given(st.randoms(use_true_random=False))
    def holds(chance):
        try:
            TARGETS[name](box, chance)
        except ValueError as error:
            if not is_meant(error):
                raise
        assert box.intruders() == []

    holds()


HERE = str(PACKAGE / "somewhere.py")


@pytest.mark.parametrize(
    ("code", "file", "meant"),
    [
        ("raise ValueError(1)", HERE, True),
        ("try: json.loads('{')\nexcept ValueError as error: raise ValueError(1) from error", HERE, True),
        ("json.loads('{')", HERE, False),
        ("try: json.loads('{')\nexcept ValueError: raise", HERE, False),
        ("b'\\xff'.decode()", HERE, False),  # a built-in has no frame of its own
        ("raise ValueError(1)", "/elsewhere.py", False),
    ],
)
def test_only_our_own_words_count_as_a_refusal(code, file, meant):
    with pytest.raises(ValueError, match=r".") as caught:
        exec(compile(code, file, "exec"), {"json": json})
    assert is_meant(caught.value) is meant


def test_files_that_are_none_or_too_large(tmp_path):
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(ValueError, match="is not a file"):  # and not waited for
        read_json(tmp_path / "config.json")
    (tmp_path / "large.json").write_text(json.dumps({"a": "x" * CONFIG_BYTES}))
    with pytest.raises(ValueError, match="more than the 1048576"):
        read_json(tmp_path / "large.json")
    (tmp_path / "digits.json").write_text('{"a": ' + "1" * 5000 + "}")
    with pytest.raises(ValueError, match=r"digits\.json is not readable JSON"):
        read_json(tmp_path / "digits.json")


def test_a_config_of_many_layers_is_refused_before_it_is_built(box):
    source = box.fresh(config__json=json.dumps(box.json("config.json") | {"num_hidden_layers": 99_999}).encode())
    start = time.process_time()
    with pytest.raises(ValueError, match="holds the weights of 5 layers"):
        load_model(source)
    assert time.process_time() - start < 5


@pytest.mark.parametrize("dtype", ["I64", "U8", "F8_E4M3", "BOOL"])
def test_weights_that_are_no_plain_floats_are_refused(box, dtype):
    good = box.good["model.safetensors"]
    length = int.from_bytes(good[:8], "little")
    header = json.loads(good[8 : 8 + length])
    tensor = header["model.norm.weight"]
    size = {"I64": 8, "U8": 1, "F8_E4M3": 1, "BOOL": 1}[dtype]
    tensor["dtype"], tensor["shape"] = dtype, [(tensor["data_offsets"][1] - tensor["data_offsets"][0]) // size]
    written = json.dumps(header).encode()
    source = box.fresh(model__safetensors=len(written).to_bytes(8, "little") + written + good[8 + length :])
    with pytest.raises(ValueError, match=f"is stored as {dtype}|has shape"):
        load_model(source)


@pytest.mark.parametrize(
    ("settings_", "named"),
    [
        ({"eos_token_id": 512}, "eos_token_id is 512, expected tokens from 0 to 511"),
        ({"eos_token_id": [1, None]}, "eos_token_id"),
        ({"temperature": "hot"}, "temperature is 'hot'"),
        ({"temperature": 1e-300}, "temperature"),
        ({"top_k": 1.5}, "top_k is 1.5, expected a whole number"),
        ({"do_sample": "yes"}, "do_sample is 'yes', expected true or false"),
    ],
)
def test_generation_configs_that_cannot_be(tmp_path, settings_, named):
    (tmp_path / "generation_config.json").write_text(json.dumps(settings_))
    with pytest.raises(ValueError, match=r".") as caught:
        generation_config(tmp_path, 512)
    assert named in str(caught.value)


def test_generation_configs_that_can(tmp_path):
    assert generation_config(tmp_path, 512) is None
    (tmp_path / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [1, 2], "temperature": 0.6, "watermarking_config": {}})
    )
    with pytest.warns(UserWarning, match="not used here: watermarking_config"):
        found = generation_config(tmp_path, 512)
    assert (found.eos_token_id, found.temperature) == ([1, 2], 0.6)


def test_a_tokenizer_with_an_impossible_length_is_refused(box):
    source = box.fresh(
        tokenizer_config__json=json.dumps(box.json("tokenizer_config.json") | {"model_max_length": "long"}).encode()
    )
    with pytest.raises(ValueError, match="model_max_length is 'long'"):
        load_tokenizer(source)


BROKEN_TARGETS = """
import os, time
from ladder_residual.bench.fuzz import targets
from ladder_residual.config import Wiring

def crash(box, chance): os.abort()
def hang(box, chance): time.sleep(999)
def memory(box, chance): bytearray(4 << 30)
def escape(box, chance): (box.outside / "loot").write_text("x")
def bug(box, chance): raise KeyError("x")
def fine(box, chance): Wiring.parse("x", 2)
def stray(box, chance): raise ValueError("x")

targets.TARGETS.update(crash=crash, hang=hang, memory=memory, bug=bug, fine=fine, stray=stray, escape=escape)
"""


@pytest.mark.slow
def test_the_fuzzer_counts_what_goes_wrong(tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text(BROKEN_TARGETS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    names = ["fine", "stray", "crash", "memory", "bug", "hang", "escape"]
    result = run_campaign(7, targets=names, workers=1, silent=60)
    findings = {finding["target"]: finding["finding"] for finding in result["findings"]}
    assert result["inputs"] == 7
    assert result["refused"] == 1
    assert "ended with code -6" in findings["crash"]
    assert "MemoryError" in findings["memory"]
    assert "KeyError" in findings["bug"]
    assert "ValueError" in findings["stray"]
    assert "hung" in findings["hang"]
    assert "loot" in findings["escape"]


@pytest.mark.slow
def test_some_hundred_inputs_without_an_unexpected_end():
    result = run_campaign(900, seed=11, targets=list(TARGETS))
    assert result["inputs"] == 900
    assert result["findings"] == []
    assert all(row["accepted"] and row["refused"] for row in result["rows"])  # neither everything nor nothing is let through
