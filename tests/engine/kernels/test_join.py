"""The kernel between two modules against the same in torch."""

import pytest
import torch

ROWS, HIDDEN, EPS = 3, 96, 1e-6  # a hidden size that is no power of two


def rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight


def join_slowly(stream, terms, weight, offset):
    x = stream.float()
    for term, kind, norm in terms:
        value = term.float()
        if kind == 3:
            value = rms_norm(value, norm.float() + offset)
        x = x - value if kind == 2 else x + value
    return rms_norm(x, weight.float() + offset), x


@pytest.mark.parametrize("kinds", [(), (1,), (1, 1), (1, 1, 2), (3,), (3, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_it_joins_and_norms(interpreter, kinds, dtype, offset) -> None:
    from ladder_residual.engine.kernels.join import norm_after_joining

    generator = torch.Generator().manual_seed(sum(kinds))

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    stream, weight = random(ROWS, HIDDEN), random(HIDDEN)
    before = stream.clone()
    terms = [(random(ROWS, HIDDEN), kind, random(HIDDEN) if kind == 3 else None) for kind in kinds]
    out, joined = norm_after_joining(stream, terms, weight, EPS, offset)
    expected_out, expected_joined = join_slowly(stream, terms, weight, offset)
    tolerance = {"rtol": 1e-2, "atol": 1e-2} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(out.float(), expected_out, **tolerance)
    torch.testing.assert_close(joined.float(), expected_joined, **tolerance)
    assert out.dtype == joined.dtype == dtype
    assert torch.equal(stream, before)  # others may hold it
    assert (joined is stream) == (not kinds)


def test_columns_of_another_tensor_and_no_rows(interpreter) -> None:
    from ladder_residual.engine.kernels.join import ADD, norm_after_joining

    generator = torch.Generator().manual_seed(0)
    wide, stream = torch.randn(ROWS, 2 * HIDDEN, generator=generator), torch.randn(ROWS, HIDDEN, generator=generator)
    part, weight = wide[:, HIDDEN:], torch.ones(HIDDEN)
    out, joined = norm_after_joining(stream, [(part, ADD.value, None)], weight, EPS, 0.0)
    torch.testing.assert_close(joined, stream + part)
    torch.testing.assert_close(out, rms_norm(stream + part, weight))
    out, joined = norm_after_joining(stream[:0], [(part[:0], ADD.value, None)], weight, EPS, 0.0)
    assert out.shape == joined.shape == (0, HIDDEN)
