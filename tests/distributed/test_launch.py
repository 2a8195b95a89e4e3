"""Ranks of one host start alike, forked from the launcher or executed anew."""

import json
import re
import sys

import pytest

from tests.forked import run_program


def start(how, *arguments):
    done = run_program(how, *arguments, module="tests.distributed.start_hello", input="a line\n")
    return done.returncode, dict(map(json.loads, done.stdout.splitlines())), done.stderr


@pytest.mark.parametrize("arguments", [["one", "two"], ["fail"]])
def test_a_forked_rank_finds_what_an_executed_one_finds(arguments):
    forked, executed = start("fork", *arguments), start("execute", *arguments)
    assert [forked[:2], sorted(forked[1])] == [executed[:2], ["0", "1"]]
    assert forked[1]["0"]["read"] == "a line\n"
    assert forked[1]["0"]["interfaces"]  # nothing is offered to other hosts, also not by NCCL
    assert forked[0] == (1 if "fail" in arguments else 0)
    if "fail" in arguments:  # the rank left no message: the launcher names it
        assert all("rank 1 of 2" in said and "failed with exit code 2" in said for said in (forked[2], executed[2]))


@pytest.mark.parametrize("how", ["fork", "execute"])
def test_the_killed_rank_is_named_although_another_spoke_first(how):
    code, _, said = start(how, "lose")
    bar, cause, consequence = said.splitlines()
    assert (code, bar) == (1, "50 %|#####     | ")
    assert re.match(r"error: rank 1 of 2 \(pid \d+\) on .* was killed by SIGKILL", cause)
    assert consequence == "error: rank 0 lost its connection to rank 1 at 127.0.0.1: Connection reset by peer"


@pytest.mark.skipif(sys.platform != "linux", reason="the limit is Linux's")
@pytest.mark.parametrize("how", ["fork", "execute"])
@pytest.mark.parametrize("what", ["starve", "mute"])
def test_a_rank_without_memory_is_named(how, what):
    """Also where it has no memory for the frames of its calls, or none to say so."""
    code, _, said = start(how, what)
    assert code == 1
    assert re.fullmatch(r"error: rank 1: rank 1 on \S+ ran out of memory: use more ranks, .*\n", said)


@pytest.mark.parametrize("how", ["fork", "execute"])
def test_a_bug_on_a_rank_shows_its_traceback(how):
    code, _, said = start(how, "bug")
    assert code == 1
    assert "in trip_rank_1" in said
    assert "KeyError: 'a bug'" in said
    assert "error: rank 1 of 2 " in said.splitlines()[-1]
