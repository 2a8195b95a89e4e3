"""Times as users write them."""

import pytest

from ladder_residual.common.units import read_seconds


def test_seconds_with_units():
    assert read_seconds("500us") == pytest.approx(5e-4)
    assert read_seconds("2ms") == pytest.approx(2e-3)
    assert read_seconds("0") == read_seconds("none") == 0
    assert read_seconds("auto") is None


@pytest.mark.parametrize(("text", "named"), [("5", "has no unit"), ("fast", "cannot read"), ("99s", "between 0 and 60 s")])
def test_times_that_are_none(text, named):
    with pytest.raises(ValueError, match=named):
        read_seconds(text)
