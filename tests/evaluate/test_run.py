"""A session: what it evaluates, and on which windows."""

import pytest

from ladder_residual.distributed.world import World
from ladder_residual.evaluate.plan import Plan
from ladder_residual.evaluate.run import Session


def test_windows_are_no_longer_than_the_models_context(demo_dir, story_text):
    with pytest.warns(UserWarning, match="the model's context is 512 tokens: windows hold 512, not 4096"):
        found = Session(Plan(perplexity=story_text, context=4096, stride=4096), World()).evaluate(str(demo_dir), None)[
            "perplexity"
        ]
    assert (found["context"], found["stride"]) == (512, 512)
