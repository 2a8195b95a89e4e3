"""The table of measured all-reduces and the formula for links that nobody measured."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ladder_residual.links import Link
from ladder_residual.links.table import interpolate, tables
from ladder_residual.plan.hardware import shipped

CURVE = ((1024, 4.0), (4096, 4.0), (65536, 16.0))


def test_interpolation_hits_measured_points_and_stays_between_them():
    assert interpolate(CURVE, 4096) == pytest.approx(4.0)
    assert interpolate(CURVE, 16384) == pytest.approx(8.0)  # halfway in log size, geometric mean in time
    assert interpolate(CURVE, 1) == 4.0
    assert interpolate(CURVE, 2 * 65536) == pytest.approx(32.0)


@given(size=st.integers(512, 2**30), device=st.sampled_from(sorted({key for key in tables() if key[1] == "nccl"})))
def test_a_larger_message_is_never_faster(size, device):
    for curve in tables()[device].values():
        assert interpolate(curve, size) <= interpolate(curve, 2 * size) * (1 + 1e-9)


def test_table_says_what_was_published_for_h100():
    nccl = tables()["h100_sxm", "nccl"][8]
    assert interpolate(nccl, 16384) == pytest.approx(16.7, abs=0.5)
    assert interpolate(tables()["h100_sxm", "trtllm"][8], 16384) < 4


def test_alpha_beta_is_the_formula():
    link = Link(name="x", title="x", alpha_us=30, bandwidth_gbs=10, ranks=4)
    assert link.us(10_000, 4) == pytest.approx(30 + 1.5 * 10_000 / 10_000)
    assert link.us(0, 16) == pytest.approx(60)  # twice the depth
    assert link.us(10_000, 1) == 0


def test_unmeasured_rank_count_between_two_measured_ones_is_interpolated_and_beyond_refused():
    hardware = shipped()
    link = hardware.link("nccl", hardware.device("h100"))
    assert link.us(16384, 4) < link.us(16384, 6) < link.us(16384, 8)
    with pytest.raises(ValueError, match="at most 8 ranks, tp=16"):
        link.us(16384, 16)
