"""Stored evaluations: what cannot be compared is refused as it is read, before a model is scored."""

import json

import pytest

from ladder_residual.evaluate.results import FORMAT, compare, load

ROW = {
    "task": "piqa",
    "metric": "acc",
    "shots": 0,
    "n": 2,
    "value": 0.5,
    "stderr": 0.1,
    "higher_is_better": True,
    "shown": True,
}
GOOD = {
    "format": FORMAT,
    **{"model": "m", "date": "d", "dtype": "float32", "machine": "x"},
    "rows": [ROW],
    "items": {"piqa": {"acc": {"rows": "x", "values": [0, 1]}}},
    "perplexity": {"file": "t", "context": 8, "stride": 4, "tokens": 8, "nats_per_token": 2.0, "windows": [[4, 8.0], [4, 8.0]]},
}


def written(tmp_path, **changes):
    (tmp_path / "result.json").write_text(json.dumps(GOOD | changes))
    return tmp_path / "result.json"


def test_a_good_one_compares_with_itself(tmp_path):
    result = load(written(tmp_path))
    assert [row["difference"] for row in compare(result, result)] == [0]


@pytest.mark.parametrize(
    "changes",
    [
        {"rows": [1]},
        {"rows": [{}]},
        {"rows": [ROW | {"value": "high"}]},
        {"rows": [ROW | {"value": 10**400, "stderr": 0.1}]},
        {"items": []},
        {"perplexity": {}},
        {"items": {"piqa": {"acc": {"rows": "x", "values": [0, "1"]}}}},
        {"perplexity": {"file": "t"}},
        {"perplexity": GOOD["perplexity"] | {"windows": [[0, 1.0], [0, 1.0]]}},
    ],
)
def test_a_damaged_one_is_one_line(tmp_path, changes):
    with pytest.raises(ValueError, match=r"result\.json is damaged; missing or wrong: .") as caught:
        load(written(tmp_path, **changes))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["model", "date", "dtype", "machine"])
def test_what_the_tables_show_is_there(tmp_path, name):
    document = {key: value for key, value in GOOD.items() if key != name}
    (tmp_path / "result.json").write_text(json.dumps(document))
    with pytest.raises(ValueError, match=f"result.json is damaged; missing or wrong: '{name}'"):
        load(tmp_path / "result.json")


def test_values_of_other_rows_are_not_paired(tmp_path):
    theirs = load(written(tmp_path, items={"piqa": {"acc": {"rows": "x", "values": [0]}}}))
    (row,) = compare(load(written(tmp_path)), theirs)
    assert (row["paired_stderr"], row["caveat"]) == (None, "the two were given different rows or shots")
