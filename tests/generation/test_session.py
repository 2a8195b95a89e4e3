"""Sessions: what ``ladder generate`` and ``ladder chat`` do, called from Python on one and several ranks."""

import io
from contextlib import redirect_stdout
from types import SimpleNamespace

import pytest

from ladder_residual.bench.demo import demo_directory
from ladder_residual.distributed.world import World
from ladder_residual.generation.sampling import Sampling
from ladder_residual.generation.session import LoadOptions, Session
from ladder_residual.links import parse_emulation
from ladder_residual.models.convert import convert
from tests.ranks import run_on_ranks

PROMPTS = ["Once upon a time, there was a little girl", "The cat", "One day"]
SAMPLED = Sampling(max_new_tokens=20, temperature=1.0, seed=7)


def sampled_texts(world):
    session = Session(demo_directory(), world, SAMPLED, LoadOptions(wiring="ladder"))
    session.load_for(PROMPTS, batch_size=2)
    texts = [completion.text for completion in session.complete(PROMPTS, batch_size=2)]
    assert f"{world.size} ranks, cpu] 60 tokens" in session.summary() or world.size == 1
    return texts


def test_a_seed_gives_the_same_text_on_any_number_of_ranks():
    alone = sampled_texts(World())
    assert len(set(alone)) == 3
    assert run_on_ranks(4, sampled_texts) == [alone] * 4


def prompts_of_each_rank(world):
    session = Session(demo_directory(), world, SAMPLED)
    with pytest.raises(ValueError, match="the prompts of rank 1 .* differs from rank 0's"):
        session.load_for([f"prompt {world.rank}"])


def test_ranks_with_different_prompts_are_refused():
    run_on_ranks(2, prompts_of_each_rank)


def test_emulation_is_of_one_process():
    options = LoadOptions(emulation=parse_emulation("tp=2,link=24us"))
    with pytest.raises(ValueError, match="runs in one process, here are 2"):
        Session(demo_directory(), SimpleNamespace(size=2), SAMPLED, options)


def test_chat_ends_with_an_empty_line(tmp_path):
    convert(demo_directory(), tmp_path / "chat", "ladder:4", copy=True)
    (tmp_path / "chat" / "chat_template.jinja").write_text("{{ bos_token }}{% for m in messages %}{{ m.content }} {% endfor %}")
    session = Session(tmp_path / "chat", World(), Sampling(max_new_tokens=10, temperature=0))
    lines = iter([PROMPTS[0], "Then", ""])
    printed = io.StringIO()
    with redirect_stdout(printed):
        session.chat(lambda: next(lines), system="Tell a story.")
    assert len(printed.getvalue().split()) > 8


def test_chat_needs_a_template():
    with pytest.raises(ValueError, match="no chat template"):
        Session(demo_directory(), World(), SAMPLED).chat(lambda: "")
