"""What the check of every weight costs."""

import pytest

from lab.load_cost import compared, load_and_forward


def test_both_ways_take_turns_and_the_first_is_not_counted():
    asked = []

    def how(source, checked):
        asked.append(checked)
        return (2.5 if checked else 2.0) if len(asked) > 2 else 99.0

    found = compared(how, "source", rounds=2)
    assert asked == [False, True, True, False, False, True]
    assert found == {"checked_s": 2.5, "unchecked_s": 2.0, "cost_percent": pytest.approx(25.0)}


def test_a_load_is_timed(demo_dir):
    assert all(0 < load_and_forward(str(demo_dir), checked) < 60 for checked in (True, False))
