"""Differences of two results and their errors; what cannot be compared is refused as it is read."""

import json
import math

import pytest

from ladder_residual.evaluate import results
from ladder_residual.evaluate.markdown import render
from ladder_residual.evaluate.run import with_comparison


def test_against_itself_and_against_another(standard, converted):
    same = with_comparison(standard, standard)
    assert {pair["difference"] for pair in same["comparison"]} == {0.0}
    assert {pair["paired_stderr"] for pair in same["comparison"]} <= {0.0, None}
    assert {pair["changed"] for pair in same["comparison"]} <= {0.0, None}
    assert all(pair["within_one_stderr"] in (True, None) for pair in same["comparison"])
    assert same["perplexity_comparison"]["paired_stderr"] == 0.0
    other = with_comparison(converted, standard)
    pair = next(pair for pair in other["comparison"] if (pair["task"], pair["metric"]) == ("piqa", "acc"))
    ours, theirs = (result["items"]["piqa"]["acc"]["values"] for result in (converted, standard))
    differences = [a - b for a, b in zip(ours, theirs, strict=True)]
    mean = sum(differences) / len(differences)
    assert pair["difference"] == pytest.approx(mean)
    variance = sum((d - mean) ** 2 for d in differences) / (len(differences) - 1)
    assert pair["paired_stderr"] == pytest.approx(math.sqrt(variance / len(differences)))
    assert pair["unpaired_stderr"] == pytest.approx(math.hypot(pair["stderr"], pair["against_stderr"]))
    assert pair["within_one_stderr"] == (abs(pair["difference"]) <= pair["against_stderr"])
    assert converted["perplexity"]["nats_per_token"] > standard["perplexity"]["nats_per_token"] + 0.1  # untrained


def test_only_equal_rows_are_paired(standard):
    other = json.loads(json.dumps(standard))
    other["items"]["piqa"]["acc"]["rows"] = "different"
    other["perplexity"]["stride"] += 1
    found = with_comparison(standard, other)
    pair = next(pair for pair in found["comparison"] if (pair["task"], pair["metric"]) == ("piqa", "acc"))
    assert pair["paired_stderr"] is None
    assert pair["changed"] is None
    assert "different rows" in pair["caveat"]
    assert found["perplexity_comparison"]["paired_stderr"] is None


def test_rows_that_changed_are_counted_where_gains_and_losses_cancel():
    """Eight rows: two won, two lost, four as before."""
    one = {"task": "piqa", "metric": "acc", "shots": 0, "n": 8, "value": 0.5, "stderr": 0.2, "shown": True}
    before, after = [1, 1, 1, 1, 0, 0, 0, 0], [0, 0, 1, 1, 1, 1, 0, 0]
    theirs, ours = ({"rows": [one], "items": {"piqa": {"acc": {"rows": "same", "values": v}}}} for v in (before, after))
    (pair,) = results.compare(ours, theirs)
    assert (pair["difference"], pair["changed"]) == (0.0, 0.5)
    made = {"model": "m", "wiring": "ladder", "date": "", "dtype": "", "tp": 1, "machine": "", "torch": "", "caveats": {}}
    page = render(ours | made | {"against": {"model": "n"}, "comparison": [pair]})
    header, _, row = (line.split(" | ") for line in page.splitlines() if line.startswith("|"))
    assert row[header.index("rows changed, %")] == "50.0"
    del pair["changed"]  # a result of an earlier version
    page = render(ours | made | {"against": {"model": "n"}, "comparison": [pair]})
    header, _, row = (line.split(" | ") for line in page.splitlines() if line.startswith("|"))
    assert row[header.index("rows changed, %")] == ""


def test_paired_error_per_token_is_the_ratio_estimators():
    ours, theirs = [(10, 20.0), (10, 22.0), (5, 11.0)], [(10, 19.0), (10, 20.5), (5, 11.0)]
    ratio = 2.5 / 25
    residuals = [1.0 - 10 * ratio, 1.5 - 10 * ratio, 0.0 - 5 * ratio]
    expected = math.sqrt(3 / 2 * sum(residual**2 for residual in residuals)) / 25
    assert results.paired_stderr_per_token(ours, theirs) == pytest.approx(expected)
    assert results.paired_stderr_per_token(ours[:1], theirs[:1]) is None
    assert results.paired_stderr([1.0], [0.0]) is None


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
    "format": results.FORMAT,
    **{"model": "m", "date": "d", "dtype": "float32", "machine": "x"},
    "rows": [ROW],
    "items": {"piqa": {"acc": {"rows": "x", "values": [0, 1]}}},
    "perplexity": {"file": "t", "context": 8, "stride": 4, "tokens": 8, "nats_per_token": 2.0, "windows": [[4, 8.0], [4, 8.0]]},
}


def written(tmp_path, **changes):
    (tmp_path / "result.json").write_text(json.dumps(GOOD | changes))
    return tmp_path / "result.json"


def test_a_good_one_compares_with_itself(tmp_path):
    result = results.load(written(tmp_path))
    assert [row["difference"] for row in results.compare(result, result)] == [0]


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
        results.load(written(tmp_path, **changes))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["model", "date", "dtype", "machine"])
def test_what_the_tables_show_is_there(tmp_path, name):
    document = {key: value for key, value in GOOD.items() if key != name}
    (tmp_path / "result.json").write_text(json.dumps(document))
    with pytest.raises(ValueError, match=f"result.json is damaged; missing or wrong: '{name}'"):
        results.load(tmp_path / "result.json")


def test_values_of_other_rows_are_not_paired(tmp_path):
    theirs = results.load(written(tmp_path, items={"piqa": {"acc": {"rows": "x", "values": [0]}}}))
    (row,) = results.compare(results.load(written(tmp_path)), theirs)
    assert (row["paired_stderr"], row["caveat"]) == (None, "the two were given different rows or shots")
