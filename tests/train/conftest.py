"""A small corpus, and the runs on one process that all others are compared with."""

import pytest

from ladder_residual.train.loop import train
from ladder_residual.train.recipe import Recipe
from tests.tiny_training import tiny_corpus, tiny_recipe


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    return tiny_corpus(tmp_path_factory.mktemp("data") / "corpus")


@pytest.fixture(scope="session")
def alone(corpus, tmp_path_factory):
    """{wiring: directory of its run}."""
    directories = {}
    for wiring in ("standard", "ladder"):
        directories[wiring] = tmp_path_factory.mktemp("alone") / wiring
        train(Recipe.from_dict(tiny_recipe(corpus, directories[wiring], wiring, checkpoint=dict(every=8, keep=9))), quiet=True)
    return directories
