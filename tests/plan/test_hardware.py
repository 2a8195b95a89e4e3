"""Devices, links and the all-reduce table: what is shipped, what a user adds, what is refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ladder_residual.plan.allreduce_table import compact, interpolate, read_tables, tables
from ladder_residual.plan.hardware import Link, shipped

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


def test_compact_takes_the_median_over_versions_and_irons_out_outliers():
    def row(version, size, us):
        name = f"h9_sxm_nccl_{version}_nccl"
        return {"file": name, "kernel_source": "NCCL", "num_gpus": "8", "bytes": str(size), "us": str(us)}

    rows = [row("1", 1024, 5), row("2", 1024, 99), row("3", 1024, 6), row("1", 2048, 50), row("1", 4096, 7)]
    text = compact(rows)
    assert read_tables(text)["h9_sxm", "nccl"][8] == ((1024, 6.0), (2048, 7.0), (4096, 7.0))


def test_every_shipped_link_gives_a_time_on_a_device_that_has_it():
    hardware = shipped()
    for name, row in hardware.link_rows.items():
        link = hardware.link(name, hardware.device("h100")) if row.get("library") != "oneccl" else None
        assert link is not None
        assert link.us(16384, 8) >= 0
        assert link.us(2**24, 2) >= link.us(1024, 2)
        assert row["source"]


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


@pytest.mark.parametrize(
    ("name", "says"), [("h10", "near: h100"), ("rtx4090", "near: rtx-4090"), ("abacus", "choose from a100, h100")]
)
def test_unknown_device_lists_near_matches(name, says):
    with pytest.raises(ValueError, match=says):
        shipped().device(name)


def test_unknown_link_and_link_of_another_device():
    hardware = shipped()
    with pytest.raises(ValueError, match="near: nccl"):
        hardware.link("ncl", hardware.device("h100"))
    with pytest.raises(ValueError, match=r"not measured on device rtx-4090; links for it: .*nccl-no-p2p"):
        hardware.link("nccl", hardware.device("rtx-4090"))


def test_a_link_may_be_given_as_a_time():
    hardware = shipped()
    link = hardware.link("24.5us", hardware.device("rtx-4090"))
    assert link.us(1024, 4) == link.us(2**24, 8) == 24.5
    assert link.memory_contention == hardware.link("nccl", hardware.device("h100")).memory_contention
    with pytest.raises(ValueError, match="or a time such as 24us"):
        hardware.link("fast", hardware.device("h100"))


def test_a_few_lines_of_toml_add_a_device_and_a_link(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text(
        '[devices.mine]\nmemory_gb = 32\nbandwidth_gbs = 1000\ntflops = 100\nallreduce = "l40s"\n'
        "[links.cable]\nalpha_us = 9\nbandwidth_gbs = 5\n"
    )
    hardware = shipped().extended(file)
    assert hardware.device("mine").memory_gb == 32
    assert hardware.link("cable", hardware.device("mine")).us(0, 2) == 9
    assert hardware.link("nccl", hardware.device("mine")).us(1024, 8) > 20  # the table of the L40S


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[devices.x\n", "not valid TOML"),
        ("", "found nothing"),
        ("[machines.x]\na = 1\n", "found machines"),
        ("[devices]\nx = 3\n", "must be a table"),
        ("[devices.x]\nmemory_gb = 10\ntflops = 5\n", "needs bandwidth_gbs"),
        ("[devices.x]\nmemory_gb = 'big'\nbandwidth_gbs = 1\ntflops = 5\n", "memory_gb must be a number"),
        ("[devices.x]\nmemory_gb = -4\nbandwidth_gbs = 1\ntflops = 5\n", "must not be negative"),
        ("[devices.x]\nmemory_gb = 4\nbandwith_gbs = 1\ntflops = 5\n", "unknown field 'bandwith_gbs' .near: bandwidth_gbs"),
        ("[links.x]\nranks = 4\n", "needs alpha_us"),
        ("[links.x]\nalpha_us = 4\nbandwidth_gbs = 0\n", "bandwidth_gbs must be above 0"),
        ("[links.x]\nalpha_us = 4\nmemory_contention = 1.5\n", "share from 0 to 1"),
        ("[links.x]\nalpha_us = true\n", "alpha_us must be a number"),
    ],
)
def test_malformed_hardware_files_say_what_is_wrong(tmp_path, text, says):
    file = tmp_path / "bad.toml"
    file.write_text(text)
    with pytest.raises(ValueError, match=says):
        shipped().extended(file)


def test_missing_hardware_file(tmp_path):
    with pytest.raises(ValueError, match="cannot read hardware file"):
        shipped().extended(tmp_path / "absent.toml")
