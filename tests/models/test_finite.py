"""The check for NaN and infinities against the plain one."""

import math

import pytest
import torch

from ladder_residual.models.finite import is_finite

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("values", [[math.nan], [math.inf], [-math.inf], [math.inf, -math.inf], [math.nan, math.inf]])
@pytest.mark.parametrize("place", [0, 1234, -2])
def test_one_value_is_found_wherever_it_is(dtype, values, place):
    tensor = torch.randn(7, 1111).to(dtype)
    assert is_finite(tensor)
    tensor.view(-1)[place:][: len(values)] = torch.tensor(values[: tensor.view(-1)[place:].numel()], dtype=dtype)
    assert not is_finite(tensor)
    assert not is_finite(tensor.t())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sign", [1, -1])
def test_a_sum_that_overflows_is_no_alarm(dtype, sign):
    tensor = torch.full((3, 1000), sign * torch.finfo(dtype).max, dtype=dtype)
    assert not tensor.sum().isfinite()
    assert is_finite(tensor)
    tensor[1, 500] = math.nan
    assert not is_finite(tensor)


def test_nothing_and_whole_numbers_are_finite():
    assert is_finite(torch.empty(0, 4))
    assert is_finite(torch.arange(4))
