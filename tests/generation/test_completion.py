"""Completions of the shipped model."""

import io
import sys

import pytest

from ladder_residual.distributed.world import World
from ladder_residual.generation.completion import complete, complete_all
from ladder_residual.generation.sampling import Sampling
from ladder_residual.generation.tokenizer import load_tokenizer
from ladder_residual.models.loading import load_model

PROMPT = "Once upon a time, there was a little girl"
STORY = " named Lily. She loved to play outside in the park. One day, she saw a big, red ball."


@pytest.fixture(scope="module")
def model(demo_dir):
    return load_model(demo_dir), load_tokenizer(demo_dir)


def test_the_shipped_model_tells_its_story(model):
    text = complete(*model, [PROMPT], Sampling(max_new_tokens=60, temperature=0), World())[0].text
    assert text.startswith(STORY)


def test_batches_equal_single_prompts(model):
    prompts = [PROMPT, "The dog", "One day, Tom and Sue went to"]
    greedy = Sampling(max_new_tokens=20, temperature=0)
    together = [c.text for c in complete(*model, prompts, greedy, World())]
    assert together == [complete(*model, [prompt], greedy, World())[0].text for prompt in prompts]


def test_sampling_options(model):
    def text(**options):
        return complete(*model, [PROMPT], Sampling(max_new_tokens=25, **options), World())[0].text

    assert text(temperature=1.0, seed=1) == text(temperature=1.0, seed=1)
    assert text(temperature=1.0, seed=1) != text(temperature=1.0, seed=2)
    assert text(temperature=1.0, top_k=1, seed=3) == text(temperature=0)
    assert text(top_p=0.9, min_p=0.05, seed=4)
    assert text(repetition_penalty=1.5, temperature=0) != text(temperature=0)
    assert text(temperature=0, stop=("park",)).endswith("park")
    assert text(num_beams=3, temperature=0)


def test_one_seed_draws_anew_in_every_batch(model):
    sampling = Sampling(max_new_tokens=15, temperature=1.5, seed=7)
    options = dict(batch_size=2, chat=False)
    texts = [c.text for c in complete_all(*model, [PROMPT] * 4, sampling, World(), **options)]
    assert len(set(texts)) == 4
    assert texts == [c.text for c in complete_all(*model, [PROMPT] * 4, sampling, World(), **options)]


def test_tokens_after_a_stop_string_do_not_count(model):
    sampling = Sampling(max_new_tokens=40, temperature=0, stop=("Lily",))
    stopped, other = complete(*model, [PROMPT, "The dog and the cat"], sampling, World())
    assert stopped.text == " named Lily"
    assert stopped.new_tokens < 10 < other.new_tokens


def test_prompts_that_do_not_fit(model):
    with pytest.raises(ValueError, match="exceed the model's context of 512"):
        complete(*model, ["word " * 600], Sampling(max_new_tokens=10), World())


def test_streamed_text_does_not_steer_the_terminal(model, monkeypatch):
    for terminal in (True, False):
        stream = io.StringIO()
        stream.isatty = lambda terminal=terminal: terminal
        monkeypatch.setattr(sys, "stdout", stream)
        complete(*model, ["\x1b[31mOnce\n"], Sampling(max_new_tokens=1, temperature=0), World(), stream=True)
        assert stream.getvalue().startswith("\\x1b[31mOnce\n" if terminal else "\x1b[31mOnce\n")
