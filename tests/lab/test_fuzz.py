"""Broken and hostile input: in this process with hypothesis, in worker processes as `python -m lab.fuzz` does it."""

import json
import os
import pickle
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from lab.fuzz.box import Box
from lab.fuzz.campaign import run_campaign
from lab.fuzz.judge import SilentError, check_model, check_values
from lab.fuzz.targets import TARGETS
from lab.fuzz.targets.training import Payload, judge
from lab.fuzz.verdict import PACKAGE, is_meant
from ladder_residual.generation.tokenizer import load_tokenizer
from ladder_residual.models.checkpoint_reader import CONFIG_BYTES, read_json
from ladder_residual.models.generation_config import generation_config
from ladder_residual.models.loading import load_model


@pytest.fixture(scope="module")
def box(tmp_path_factory):
    return Box(tmp_path_factory.mktemp("fuzz"))


@pytest.mark.parametrize("name", sorted(set(TARGETS) - {"prompt", "generation config", "adapt checkpoint"}))
def test_every_kind_of_broken_input_is_accepted_or_refused(name, box):
    @settings(max_examples=12, phases=[Phase.generate], suppress_health_check=list(HealthCheck), database=None)
    @given(st.randoms(use_true_random=False))
    def holds(chance):
        try:
            TARGETS[name](box, chance)
        except ValueError as error:
            if not is_meant(error):
                raise
        assert box.changed() == []

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


@pytest.fixture
def source(box):
    return box.fresh()


def test_the_judge_compares_weights_and_logits(box, source):
    model = load_model(source)
    check_model(model, source)
    with pytest.raises(SilentError, match="logits differ"):
        check_model(model, source, "ladder")
    check_model(load_model(source, wiring="ladder"), source, "ladder")
    config = box.json("config.json") | {"rms_norm_eps": 0.1}
    (source / "config.json").write_text(json.dumps(config))
    with pytest.raises(SilentError, match="logits differ"):
        check_model(model, source)
    weights = bytearray(box.good["model.safetensors"])
    weights[-7] ^= 1
    with pytest.raises(SilentError, match="is not what the files hold"):
        check_model(model, box.fresh(model__safetensors=bytes(weights)))


def test_the_judge_compares_contents_outside_the_box(box):
    assert box.changed() == []
    (box.outside / ".bashrc").write_text("the content of .bashrd\n")
    (box.outside / "keep" / "loot").symlink_to("/etc/passwd")
    (box.outside / "config.json").chmod(0o600)
    assert box.changed() == [".bashrc", "config.json", "keep/loot"]
    assert box.changed() == []  # put back


def test_a_relative_path_leads_to_the_watched_folder(box, monkeypatch):
    """Also after everything was put back: the workers' working directory stays where it is."""
    monkeypatch.chdir(box.outside)
    box.restore()
    Path("loot").write_text("x")
    assert box.changed() == ["loot"]


def test_the_judge_of_settings_and_of_resumed_runs(tmp_path):
    check_values({"a": 1.0, "b": (1, 2), "c": {"d": "x"}}, {"a": 1, "b": [1, 2], "c": {"d": "x"}})
    for wrong in ({"a": 2}, {"b": [1]}, {"c": {"d": "y"}}, {"e": None}):
        with pytest.raises(SilentError):
            check_values({"a": 1.0, "b": (1, 2), "c": {"d": "x"}}, wrong)
    expected = {step: 1 / step for step in range(1, 7)}
    judge({5: 0.2}, expected, False, tmp_path / "x")
    judge({5: 0.3}, expected, True, tmp_path / "x")  # a forgery may hold other weights
    for wrong in ({}, {1: 1.0, 2: 0.5}, {5: 0.3}, {5: float("nan")}):
        with pytest.raises(SilentError):
            judge(wrong, expected, False, tmp_path / "x")
    pickle.loads(pickle.dumps(Payload(tmp_path / "payload")))
    with pytest.raises(SilentError, match="code"):
        judge({5: 0.2}, expected, True, tmp_path / "payload")


BROKEN_TARGETS = """
import os, time
from lab.fuzz import judge, targets
from ladder_residual.core.config import Wiring

def crash(box, chance): os.abort()
def hang(box, chance): time.sleep(999)
def memory(box, chance): bytearray(4 << 30)
def escape(box, chance): (box.outside / ".bashrc").write_text("x")
def silent(box, chance): judge.require(False, "another result")
def bug(box, chance): raise KeyError("x")
def fine(box, chance): Wiring.parse("x", 2)
def stray(box, chance): raise ValueError("x")

def after_warm_up(target):
    calls = []
    def run(box, chance):
        calls.append(1)
        if len(calls) > 1: target(box, chance)
    return run

broken = dict(crash=crash, hang=hang, memory=memory, bug=bug, fine=fine, stray=stray, escape=escape, silent=silent)
targets.TARGETS.update({name: after_warm_up(target) for name, target in broken.items()})
"""


@pytest.mark.slow
def test_the_fuzzer_counts_what_goes_wrong(tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text(BROKEN_TARGETS)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{Path(__file__).parents[2]}")
    names = ["fine", "stray", "crash", "memory", "bug", "hang", "escape", "silent"]
    result = run_campaign(8, targets=names, workers=1, silent=60)
    findings = {finding["target"]: finding["finding"] for finding in result["findings"]}
    assert result["inputs"] == 8
    assert result["refused"] == 1
    assert "ended with code -6" in findings["crash"]
    assert "MemoryError" in findings["memory"]
    assert "KeyError" in findings["bug"]
    assert "ValueError" in findings["stray"]
    assert "hung" in findings["hang"]
    assert ".bashrc" in findings["escape"]
    assert "another result" in findings["silent"]
    assert result["kinds"] == {"traceback": 3, "silent": 1, "outside": 1, "time": 0, "crash": 2}


@pytest.mark.slow
def test_some_hundred_inputs_without_an_unexpected_end():
    result = run_campaign(900, seed=11, targets=list(TARGETS))
    assert result["inputs"] == 900
    assert result["findings"] == []
    assert all(row["accepted"] and row["refused"] for row in result["rows"])  # neither everything nor nothing is let through
