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
    "model": "m",
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
        {"items": {"piqa": {"acc": {"rows": "x", "values": [0, "1"]}}}},
        {"perplexity": {"file": "t"}},
        {"perplexity": GOOD["perplexity"] | {"windows": [[0, 1.0], [0, 1.0]]}},
    ],
)
def test_a_damaged_one_is_one_line(tmp_path, changes):
    with pytest.raises(ValueError, match=r"result\.json is damaged; missing or wrong: .") as caught:
        load(written(tmp_path, **changes))
    assert "\n" not in str(caught.value)
