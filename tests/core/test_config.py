import json
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from ladder_residual.core.config import KINDS, Wiring


@pytest.mark.parametrize(
    ("spec", "layers", "canonical"),
    [
        ("ladder", range(32), "ladder"),
        ("ladder:16-31", range(16, 32), "ladder:16-31"),
        ("ladder:0,2-3,5", (0, 2, 3, 5), "ladder:0,2-3,5"),
        ("ladder:last-half", range(16, 32), "ladder:16-31"),
        ("ladder:first-half", range(16), "ladder:0-15"),
        ("ladder:last-20", range(12, 32), "ladder:12-31"),
        ("ladder: 3 , 1-2", (1, 2, 3), "ladder:1-3"),
        ("LADDER:0-31", range(32), "ladder"),
        ("standard", (), "standard"),
        ("parallel", range(32), "parallel"),
        ("desync-2x", range(32), "desync-2x"),
        ("desync-4", range(32), "desync-4x"),
        ("desync-2x@8", range(32), "desync-2x@8"),
        ("delayed-1", range(32), "delayed-1"),
        ("delayed-3:4-7@2", range(4, 8), "delayed-3:4-7@2"),
        ("no-comm", range(32), "no-comm"),
    ],
)
def test_specs(spec, layers, canonical):
    wiring = Wiring.parse(spec, 32)
    assert wiring.layers == tuple(layers)
    assert wiring.spec == canonical
    assert Wiring.parse(wiring.spec, 32) == wiring


@given(st.sampled_from(KINDS), st.integers(1, 80), st.integers(2, 9), st.data())
def test_round_trip_of_any_wiring(kind, num_layers, step, data):
    layers = tuple(data.draw(st.sets(st.integers(0, num_layers - 1))))
    tp = data.draw(st.none() | st.integers(1, 64)) if kind in ("desync", "delayed", "no-comm") and layers else None
    wiring = Wiring(kind, layers, num_layers, step if kind in ("desync", "delayed") else 0, tp)
    assert Wiring.parse(wiring.spec, num_layers) == wiring
    stored = json.loads(json.dumps({"wiring": wiring.spec}))
    assert Wiring.from_config(stored, num_layers) == wiring
    assert len(wiring.picture()) == num_layers
    assert wiring.picture().count("#") == len(wiring.layers)


@pytest.mark.parametrize(
    ("spec", "named"),
    [
        ("", "unknown wiring ''"),
        ("laddr", "did you mean 'ladder'"),
        ("ladder:", "''"),
        ("ladder:40", "layer 40, but the model has 32 layers"),
        ("ladder:30-40", "layer 40, but the model has 32 layers"),
        ("ladder:last-40", "40 layers of a model that has 32"),
        ("ladder:5-3", "runs backwards"),
        ("ladder:last-0", "names no layer"),
        ("ladder:a", "'a' is not a layer"),
        ("ladder:1,,2", "'' is not a layer"),
        ("ladder:-1", "'-1' is not a layer"),
        ("ladder:99999999999999999999", "is not a layer"),
        ("ladder@4", "drop it"),
        ("standard@4", "drop it"),
        ("desync", "unknown wiring 'desync'"),
        ("desync-1x", "at least 2"),
        ("delayed-0", "at least 1"),
        ("desync-2x@x", "must be a whole number"),
        ("desync-2x@0", "positive"),
        ("standard:1-2", "standard takes no layers"),
        ("ladder:\u0661", "is not a layer"),  # digits of another script
    ],
)
def test_bad_specs_name_the_bad_part(spec, named):
    with pytest.raises(ValueError, match=".*") as caught:
        Wiring.parse(spec, 32)
    assert named in str(caught.value)


@hypothesis_settings(max_examples=1000)
@given(
    st.text(max_size=40) | st.from_regex(r"(ladder|desync-[0-9]+x|delayed-[0-9]+)(:[0-9a-z,\-]*)?(@[0-9]*)?", fullmatch=True)
)
def test_any_string_parses_or_is_a_value_error(spec):
    try:
        wiring = Wiring.parse(spec, 12)
    except ValueError as error:
        assert len(str(error)) < 500
    else:
        assert Wiring.parse(wiring.spec, 12) == wiring


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@hypothesis_settings(max_examples=1000)
@given(_JSON, _JSON, _JSON)
def test_any_config_field_is_a_wiring_or_a_value_error(wiring, ladder_layers, num_layers):
    try:
        Wiring.from_config({"wiring": wiring, "ladder_layers": ladder_layers}, num_layers)
    except ValueError as error:
        assert str(error)


def test_reads_the_authors_field():
    assert Wiring.from_config({"ladder_layers": 3}, 8).spec == "ladder:5-7"
    assert Wiring.from_config({"ladder_layers": [0, 1, 5]}, 8).spec == "ladder:0-1,5"
    assert Wiring.from_config({"ladder_layers": 0}, 8).spec == "standard"
    assert Wiring.from_config({}, 8).spec == "standard"
    with pytest.raises(ValueError, match="last 9 layers of a model that has 8"):
        Wiring.from_config({"ladder_layers": 9}, 8)
    with pytest.raises(ValueError, match="a number"):
        Wiring.from_config({"ladder_layers": "x"}, 8)


def test_rank_dependent_wirings_refuse_another_number_of_ranks():
    Wiring.parse("desync-2x@4", 8).check_tp(4)
    with pytest.raises(ValueError, match="made for tp=4, this run has tp=2"):
        Wiring.parse("desync-2x@4", 8).check_tp(2)


def test_configuration_and_help_import_no_torch():
    code = (
        "import sys, ladder_residual, ladder_residual.core.config, ladder_residual.models.presets, ladder_residual.models.families;"
        "from typer.testing import CliRunner; from ladder_residual.cli.main import app;"
        "assert CliRunner().invoke(app, ['--help']).exit_code == 0;"
        "print([m for m in ('torch', 'transformers', 'numpy', 'matplotlib') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
