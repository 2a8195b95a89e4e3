"""Whether a run helped: the rows kept back, the gap, what is said and what is written."""

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from ladder_residual.adapt import settings as settings_module
from ladder_residual.adapt.outcome import compared, gap_closed, hold_out, sentences
from ladder_residual.adapt.run import settings_rows
from ladder_residual.cli.main import app
from ladder_residual.data.packing import RowStore
from ladder_residual.report.results import read_results
from tests.tiny_adapt import run, stop_after_a_checkpoint


def store(rows: int) -> RowStore:
    ids = np.arange(rows)[:, None].repeat(4, 1)
    return RowStore(ids, np.ones((rows, 4), np.uint8))


def seen(one: RowStore) -> set[int]:
    return {int(one.row(index)["input_ids"][0]) for index in range(len(one))}


def test_the_rows_kept_back_are_a_fixed_share_and_never_trained_on():
    [train], held = hold_out({"text": store(200)}, 0.05, at_most=64, needed=8)
    assert len(held["text"]) == 10
    assert seen(train) | seen(held["text"]) == set(range(200))
    assert not seen(train) & seen(held["text"])
    again = hold_out({"text": store(200)}, 0.05, at_most=64, needed=8)[1]
    assert seen(again["text"]) == seen(held["text"])
    assert len(hold_out({"text": store(200)}, 0.05, at_most=4, needed=8)[1]["text"]) == 4


def test_small_texts_are_trained_on_whole_or_give_one_row():
    [train], held = hold_out({"text": store(9)}, 0.05, at_most=64, needed=8)
    assert (len(train), len(held["text"])) == (8, 1)
    for rows in (1, 8):
        [train], held = hold_out({"text": store(rows)}, 0.05, at_most=64, needed=8)
        assert (len(train), held) == (rows, {})
    assert hold_out({"text": store(200)}, 0.0, at_most=64, needed=8)[1] == {}


def test_the_gap_and_the_sentences():
    assert gap_closed(4.0, 3.0, 2.0) == pytest.approx(50)
    assert gap_closed(2.0, 1.9, 2.5) is None  # no gap to close
    found = compared({"a": {"loss": 4.0}}, {"a": {"loss": 3.0}}, {"a": 2.0})
    line, verdict = sentences(found)
    assert line == "a: held-out loss 4.0000 -> 3.0000, the teacher's is 2.0000: 50 % of the gap closed"
    assert verdict.startswith("it helped")
    assert sentences(compared({"a": {"loss": 4.0}}, {"a": {"loss": 4.5}}, {}))[1].startswith("it did not help")
    assert "give --heldout FILE" in sentences({})[0]


def test_a_run_without_held_out_text_measures_itself(ground):
    result = run(ground, "itself", heldout=(), evaluate_every=4)
    (text,) = result.texts
    assert text == "train.txt"
    found = result.texts[text]
    assert found["teacher"] < found["after"] < found["before"]
    assert 0 < found["gap_closed_percent"] < 100
    assert 0 < result.share_of_text_percent < 100
    assert result.sentences()[-1].startswith("it helped")
    document = json.loads((result.output / "adapt.json").read_text(encoding="utf-8"))
    assert document["texts"] == result.texts
    assert [point["step"] for point in document["curve"]] == [0, 4, 8, 12]
    page = read_results([result.output / "adapt.json"])
    assert page.summary[0].startswith("ladder, recovery on train.txt: held-out loss from ")
    assert len(page.charts[0].series) == 2  # the student's curve and its teacher's level


def test_the_teachers_loss_is_the_one_that_the_teacher_has_as_a_student(ground):
    result = run(ground, "teacher-loss", tokens=512)
    control = run(ground, "teacher-control", tokens=512, method="sft", control=True)
    (text,) = result.texts
    assert result.texts[text]["teacher"] == pytest.approx(control.before[text]["loss"], rel=1e-5)


def test_a_resumed_run_still_knows_the_loss_before(ground):
    options = dict(heldout=(), tokens=512 * 4, save_every=2)
    assert stop_after_a_checkpoint(ground, "resumed-heldout", **options) == "stopped"
    with pytest.raises(ValueError, match=r"other settings \(holdout\)"):
        run(ground, "resumed-heldout", **options | {"heldout": (str(ground / "heldout.txt"),)})
    result = run(ground, "resumed-heldout", **options)
    whole = run(ground, "whole-heldout", **options)
    assert result.texts == whole.texts
    assert [point["step"] for point in result.curve] == [0, 4]


def test_a_step_never_draws_a_row_that_is_kept_back():
    one = settings_module.AdaptSettings(student="s", method="sft", sequence=4, batch_tokens=16, epochs=3.0, data=(_source(),))
    [train], held = hold_out({"text": store(40)}, one.holdout, at_most=8, needed=one.rows_per_step)
    drawn = settings_rows(one, [train])
    assert not {int(drawn[index]["input_ids"][0]) for index in range(len(drawn))} & seen(held["text"])


def _source():
    return settings_module.DataSource("text")


def test_a_missing_extra_is_one_line(ground, monkeypatch):
    monkeypatch.setattr(settings_module, "find_spec", lambda name: None)
    words = ["adapt", str(ground / "ladder"), "--teacher", str(ground / "original"), "--data", str(ground / "train.txt")]
    with pytest.raises(ValueError, match=r"needs the accelerate package: pip install 'ladder-residual\[train\]'"):
        CliRunner().invoke(app, words, catch_exceptions=False)


def test_the_command_says_whether_it_helped(ground):
    words = ["adapt", str(ground / "ladder"), "--teacher", str(ground / "original"), "--data", str(ground / "train.txt")]
    words += ["--out", str(ground / "said"), "--sequence", "64", "--batch-tokens", "512", "--tokens", "4096", "--lr", "2e-3"]
    done = CliRunner().invoke(app, [*words, "--device", "cpu"], catch_exceptions=False)
    assert "% of the text" in done.output
    assert "train.txt: held-out loss " in done.output
    assert "% of the gap closed" in done.output
    assert "it helped" in done.output
