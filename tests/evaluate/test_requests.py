"""An evaluation in three steps gives the figures of one in one step."""

import pytest

from ladder_residual.distributed.world import World
from ladder_residual.evaluate.requests import Requests, Scores, load_scores
from ladder_residual.evaluate.run import Session
from ladder_residual.evaluate.score import score_all
from ladder_residual.models.loading import load_model


def test_three_steps_are_one(standard, plan, tasks, demo_dir, tmp_path):
    """Requests without a model, scores without the harness, metrics without a model: the very same figures."""
    session = Session(plan, World())
    session.requests(str(demo_dir), tasks).save(tmp_path / "requests.gz")
    requests = Requests.load(tmp_path / "requests.gz")
    assert set(requests.groups) == {"loglikelihood", "rolling", "perplexity"}
    scores = score_all(load_model(demo_dir), requests)
    Scores(scores.by_key, {"model": "elsewhere", "wiring": "standard"}).save(tmp_path / "scores.json")
    again = session.from_scores(str(demo_dir), tasks, load_scores(tmp_path / "scores.json")[""])
    assert again["rows"] == standard["rows"]
    assert again["items"] == standard["items"]
    assert again["perplexity"] == standard["perplexity"]
    assert again["model"] == "elsewhere"
    assert again["machine"] == "not recorded"  # this machine made none of the scores
    fewer = Scores(dict(list(scores.by_key.items())[:-40]))
    with pytest.raises(ValueError, match="has no score"):
        session.from_scores(str(demo_dir), tasks, fewer)
