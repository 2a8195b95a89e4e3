"""Rounding to nearest and column by column, against slow twins and the library that owns the layout."""

import pytest
import torch

from ladder_residual.models.quantization.rounding import DAMPING, Fp8, Int4, Rounded

FORMATS = pytest.mark.parametrize("format", [Fp8(), Int4(32)], ids=lambda format: format.name)


def random_weight(rows=12, columns=320):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(3)) * torch.linspace(0.2, 2, columns)


def random_gram(columns=320, tokens=900):
    """Of inputs that go together, as those of a layer do."""
    generator = torch.Generator().manual_seed(4)
    mixed = torch.randn(columns // 4, columns, generator=generator)
    x = torch.randn(tokens, columns // 4, generator=generator) @ mixed + 0.3 * torch.randn(tokens, columns, generator=generator)
    return (x.T @ x).double()


def one_column_after_the_other(format, weight, scales, gram):
    """GPTQ as the paper derives it: the inverse of what is left is computed anew for every column."""
    weight, scales = weight.double().clone(), scales.double().repeat_interleave(weight.shape[1] // scales.shape[1], 1)
    gram = gram + DAMPING * gram.diagonal().mean() * torch.eye(len(gram)).double()
    numbers, left = torch.zeros_like(weight), gram.diagonal().argsort(descending=True).tolist()
    while left:
        inverse = torch.linalg.inv(gram[left][:, left])
        column = left[0]
        numbers[:, column] = format.nearest(weight[:, column] / scales[:, column])
        error = (weight[:, column] - numbers[:, column] * scales[:, column]) / inverse[0, 0]
        weight[:, left] -= error[:, None] * inverse[0]
        left = left[1:]
    return numbers


@FORMATS
def test_columns_make_up_for_what_rounding_loses(format):
    weight, gram = random_weight(), random_gram()
    nearest, found = format.round("w", weight, weight.dtype), format.round("w", weight, weight.dtype, gram)
    assert torch.equal(nearest.scales, found.scales)
    slow = one_column_after_the_other(format, weight, found.scales, gram)
    assert (found.numbers.double() == slow).double().mean() > 0.99  # a tie or two falls the other way in float32

    def lost(rounded):
        error = rounded.weight().double() - weight.double()
        return float(((error @ gram) * error).sum())

    assert lost(found) == pytest.approx(lost(Rounded(slow.float(), found.scales)), rel=0.02)
    assert lost(found) < 0.5 * lost(nearest)
    assert (found.numbers == format.nearest(found.numbers)).all()  # nothing but numbers of the format


@FORMATS
def test_without_inputs_numbers_are_rounded_to_the_nearest(format):
    weight = random_weight()
    nearest = format.round("w", weight, weight.dtype)
    unread = format.round("w", weight, weight.dtype, torch.zeros(320, 320).double())
    assert torch.equal(nearest.numbers, unread.numbers)
    dead = random_gram()
    dead[7], dead[:, 7] = 0, 0  # a column that reads nothing
    assert torch.isfinite(format.round("w", weight, weight.dtype, dead).numbers).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_int4_numbers_are_the_nearest_and_clips_pay(dtype):
    weight = random_weight(6, 64).to(dtype)
    weight[2] = 0
    numbers, scales = Int4(32).round("w", weight, dtype)
    assert (numbers.shape, scales.shape, scales.dtype) == ((6, 64), (6, 2), dtype)
    steps = scales.float().repeat_interleave(32, 1)
    errors = torch.stack([(steps * number - weight.float()).abs() for number in range(-8, 8)])
    assert torch.allclose((steps * numbers - weight.float()).abs(), errors.amin(0), atol=1e-6)
    largest = weight.float().unflatten(1, (2, 32)).abs().amax(-1) / 7.5
    assert (scales.float() <= largest * 1.01)[[0, 1, 3, 4, 5]].all()
    whole = torch.where(largest == 0, 1, largest).repeat_interleave(32, 1)
    unclipped = (weight.float() / whole).round().clamp(-8, 7) * whole
    assert (steps * numbers - weight.float()).norm() < (unclipped - weight.float()).norm()
    assert (numbers[2] == 0).all()


def test_int4_is_stored_as_its_library_stores_it():
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    format, weight = Int4(64), random_weight(6, 128)
    rounded = format.round("w", weight, torch.bfloat16)
    found = format.stored("m", rounded)
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**format.weights))
    compressor = BaseCompressor.get_value_from_registry("pack-quantized")
    dense = {"weight": rounded.weight(), "weight_scale": rounded.scales.float()}
    theirs = compressor.compress(dense, scheme)
    assert {name.removeprefix("m.") for name in found} == set(theirs)
    for name, tensor in theirs.items():
        assert torch.equal(found[f"m.{name}"].float(), tensor.float()), name
