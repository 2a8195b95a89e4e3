"""What sampling refuses."""

import pytest

from ladder_residual.generation.sampling import Sampling


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"temperature": -1}, "temperature must be between"),
        ({"top_p": 1.5}, "top-p must be between 0 and 1, got 1.5"),
        ({"max_new_tokens": 0}, "max-new-tokens"),
        ({"stop": ("",)}, "stop string is empty"),
    ],
)
def test_bad_sampling(options, named):
    with pytest.raises(ValueError, match=named):
        Sampling(**options)
