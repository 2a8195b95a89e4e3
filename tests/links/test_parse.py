"""A name means one time; what is no link is refused in one sentence."""

import re

import pytest

from ladder_residual.links import Link, parse_emulation, parse_link
from ladder_residual.links.parse import read_links, shipped_links
from ladder_residual.links.table import tables
from ladder_residual.plan.hardware import shipped


def test_fixed_and_linear_links():
    assert parse_link("24us").us(16384, 8) == 24
    assert parse_link("none").silent
    linear = parse_link("alpha=10, beta=100")
    assert linear.us(1_000_000, 2) == linear.us(1_000_000, 16) == pytest.approx(10 + 10)
    assert not parse_link("alpha=0,beta=100").silent
    assert parse_link("24us").us(16384, 1) == 0  # one rank reduces with nobody


def test_a_link_that_is_not_launched_early():
    link = parse_link(" 24us,no-pdl")
    assert (link.name, link.pdl, link.us(16384, 8)) == ("24us,no-pdl", False, 24)
    assert parse_link("24us").pdl
    assert parse_link("alpha=12,beta=90, no-pdl").name == "alpha=12,beta=90,no-pdl"
    measured = parse_link("h200-nccl,no-pdl", tp=8)
    assert measured.us(16384, 8) == parse_link("h200-nccl").us(16384, 8)
    assert measured.name == "h200-nccl,no-pdl"
    with pytest.raises(ValueError, match="unknown link 'soon'"):
        parse_link("soon,no-pdl")
    for text in ("none,no-pdl", "24us,no-pdl,no-pdl"):
        with pytest.raises(ValueError, match=rf"{re.escape(text)}': no-pdl stands once, behind a link that takes time"):
            parse_link(text)


def test_measured_links_interpolate_between_their_points():
    link = parse_link("h200_sxm-nccl", tp=8)
    points = dict(tables()["h200_sxm", "nccl"][8])
    assert link.us(16384, 8) == pytest.approx(points[16384], rel=1e-12)
    assert points[16384] <= link.us(24576, 8) <= points[32768]
    assert link.us(4 * max(points), 8) == pytest.approx(4 * points[max(points)])
    assert parse_link("h200-nccl") == link
    assert link.us(16384, 2) < link.us(16384, 3) < link.us(16384, 4)


def test_a_name_means_the_same_time_in_the_planner_and_on_an_emulated_rank():
    hardware = shipped()
    for device, short in (("h200", "h200"), ("h100", "h100"), ("l40s", "l40s"), ("rtx-pro-6000", "rtx_pro_6000_server")):
        for library in ("nccl", "vllm", "sglang", "one-shot"):
            planned = hardware.link(library, hardware.device(device))
            emulated = parse_link(f"{short}-{library}", tp=8)
            assert [planned.us(size, 8) for size in (4096, 24576, 10**7)] == [
                emulated.us(size, 8) for size in (4096, 24576, 10**7)
            ]
    for name in ("24us", "none", "ib-2-nodes", "1gbe", "alpha=5,beta=2"):
        assert hardware.link(name, hardware.device("h100")) == parse_link(name)


def test_what_a_call_costs_inside_a_model_is_a_term_of_its_own():
    link = parse_link("h200-nccl")
    assert link.us(16384, 8) == pytest.approx(17.78)
    assert link.in_situ_us == 7.785
    assert link.in_model_us(16384, 8) == link.in_situ_us + link.us(16384, 8)
    assert link.in_model_us(16384, 1) == 0


def test_every_shipped_link_is_a_name():
    for name in shipped_links():
        link = parse_link(name, device="h100_sxm")
        assert link.name == name
        assert link.us(16384, 8) > 0
        assert link.source


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("fast", "unknown link 'fast'"),
        ("24 ms", "unknown link"),
        ("alpha=1,beta=0", "must be above 0"),
        ("ncl", r"did you mean 'nccl'\?"),
        ("nccl", "measured on each device: write which, as in h200-nccl"),
        ("b60-nccl", "link b60-nccl was not measured on b60; measured there: oneccl"),
        ("h200-slow", "link h200-slow was not measured on h200_sxm; measured there: nccl"),
        ("h200-1gbe", "link h200-1gbe was not measured on h200_sxm"),
    ],
)
def test_what_is_no_link(text, says):
    with pytest.raises(ValueError, match=says):
        parse_link(text)


def test_a_link_measured_on_other_numbers_of_gpus():
    with pytest.raises(ValueError, match="joins at most 8 ranks, tp=16"):
        parse_link("h200-nccl", tp=16)
    one = Link(name="x", curves={4: ((512, 5.0),), 8: ((512, 9.0),)})
    with pytest.raises(ValueError, match="measured on 4, 8 GPUs, not on 2"):
        one.us(512, 2)


@pytest.mark.parametrize(
    ("rows", "says"), [(3, "links must be tables"), ({"x": 3}, "must be a table"), ({"x": {}}, "needs alpha_us")]
)
def test_tables_that_are_no_links(rows, says):
    with pytest.raises(ValueError, match=says):
        read_links(rows, "mine.toml")


@pytest.mark.parametrize(
    ("text", "tp", "us"),
    [
        ("tp=8,link=24us", 8, 24.0),
        ("tp=8,link=24us,no-pdl", 8, 24.0),
        ("tp=4, link=h200-nccl", 4, None),
        ("link=h200-nccl,tp=4", 4, None),
        ("tp=16,alpha=10,beta=100", 16, 10 + 16384e-5),
    ],
)
def test_an_emulated_rank_is_said_in_one_option(text, tp, us):
    found = parse_emulation(text)
    assert found.tp == tp
    assert found.link.pdl == ("no-pdl" not in text)
    assert found.link.us(16384, tp) == pytest.approx(us or parse_link("h200-nccl").us(16384, 4))
    assert str(found).startswith(f"emulated rank of tp={tp}, link ")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "tp=8",
        "link=24us",
        "tp=1,link=24us",
        "tp=x,link=24us",
        "tp=8,link=24us,speed=2",
        "tp=8,link=slow",
        "tp=8,tp=4,link=1us",
    ],
)
def test_a_bad_emulation_names_itself(text):
    with pytest.raises(ValueError, match=r"cannot emulate|unknown link"):
        parse_emulation(text)
