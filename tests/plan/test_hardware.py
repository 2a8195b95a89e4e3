"""Devices and links: what is shipped, what a user adds, what is refused."""

import math
from dataclasses import fields, replace

import pytest

from ladder_residual.links import Link
from ladder_residual.models.presets import presets
from ladder_residual.plan.hardware import Device, shipped
from ladder_residual.plan.planner import evaluate, make_cases


def test_every_shipped_link_gives_a_time_on_a_device_that_has_it():
    hardware = shipped()
    for name, known in hardware.links.items():
        link = hardware.link(name, hardware.device("h100"))
        assert link.us(16384, 8) >= 0
        assert link.us(2**24, 2) >= link.us(1024, 2)
        assert known.source


@pytest.mark.parametrize(
    ("name", "says"),
    [("h10", "did you mean 'h100'"), ("rtx4090", "did you mean 'rtx-4090'"), ("abacus", "choose from a100, h100")],
)
def test_unknown_device_lists_near_matches(name, says):
    with pytest.raises(ValueError, match=says):
        shipped().device(name)


def test_unknown_link_and_link_of_another_device():
    hardware = shipped()
    with pytest.raises(ValueError, match="did you mean 'nccl'"):
        hardware.link("ncl", hardware.device("h100"))
    with pytest.raises(ValueError, match=r"not measured on device rtx-4090; links for it: .*nccl-no-p2p"):
        hardware.link("nccl", hardware.device("rtx-4090"))


def test_a_link_may_be_given_as_a_time():
    hardware = shipped()
    link = hardware.link("24.5us", hardware.device("rtx-4090"))
    assert link.us(1024, 4) == link.us(2**24, 8) == 24.5
    assert link.memory_contention == hardware.link("nccl", hardware.device("h100")).memory_contention
    with pytest.raises(ValueError, match="write none, 24us, alpha=12,beta=90"):
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
        ("[machines.x]\na = 1\n", "found 'machines'"),
        ("[devices]\nx = 3\n", "must be a table"),
        ("[devices.x]\nmemory_gb = 10\ntflops = 5\n", "devices.x: bandwidth_gbs is missing"),
        ("[devices.x]\nmemory_gb = 'big'\nbandwidth_gbs = 1\ntflops = 5\n", "memory_gb must be a number"),
        (
            "[devices.x]\nmemory_gb = -4\nbandwidth_gbs = 1\ntflops = 5\n",
            "memory_gb must be at least 1e-09 and at most 1e.09, got -4",
        ),
        (
            "[devices.x]\nmemory_gb = 4\nbandwith_gbs = 1\ntflops = 5\n",
            "unknown key bandwith_gbs .did you mean 'bandwidth_gbs'",
        ),
        ("[links.x]\nranks = 4\n", "needs alpha_us"),
        ("[links.x]\nalpha_us = 4\nbandwidth_gbs = 0\n", "bandwidth_gbs must be at least 1e-09, got 0"),
        ("[links.x]\nalpha_us = 4\nmemory_contention = 1.5\n", "memory_contention must be at least 0 and below 1, got 1.5"),
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


NUMBERS = ["true", "nan", "inf", "-inf", "-1", "0", "1e-320", "1e300", "0x10", "0.5", "1e9", "4096", "9" * 400, "9" * 5000]
TEXTS = ['""', '"x"', '"nccl"', '"h100_sxm"', '"paper"', '"""a\nb"""', '"\\u0000"']
OTHERS = ["[]", "{}", "[1,2]", "{a=1}", "[[[1]]]", "1979-05-27", "07:32:00", "[" * 3000 + "]" * 3000, "."]
SMALL = replace(presets()["llama-3.1-8b"], num_layers=2)
WHOLE = {
    "devices": {"memory_gb": "32", "bandwidth_gbs": "1000", "tflops": "100", "allreduce": '"l40s"'},
    "links": {"alpha_us": "9", "bandwidth_gbs": "5"},
}


@pytest.mark.parametrize("kind", ["devices", "links"])
@pytest.mark.parametrize("value", [*NUMBERS, *TEXTS, *OTHERS], ids=lambda value: value[:20])
def test_any_value_of_any_field_is_planned_with_or_refused_in_one_line(tmp_path, kind, value):
    file = tmp_path / "odd.toml"
    keys = [field.name for field in fields(Device if kind == "devices" else Link)]
    for key in [*keys, '"a\\nb"', "library.x"]:
        file.write_text(f"[{kind}.x]\n" + "".join(f"{k} = {v}\n" for k, v in {**WHOLE[kind], key: value}.items()))
        try:
            hardware = shipped().extended(file)
            device, link = ("x", "nccl") if kind == "devices" else ("h100", "x")
            asked = dict(device=device, tp=[2], link=[link], batch=[2], prompt=8, new=4, hardware=hardware)
            [(name, case)] = make_cases(SMALL, **asked)
            row = evaluate(name, case)
            assert all(math.isfinite(gain) and gain > 0 for gain in row.speedup.values())
        except ValueError as error:
            assert "\n" not in str(error)


@pytest.mark.parametrize(
    "text",
    [
        "devices = 3",
        "links = [1]",
        "[[links]]",
        "[[devices.x]]",
        "[links.x.y]\nalpha_us = 3",
        '[links."a\\nb"]',
        '[devices."a,b"]',
        "x\x00",
    ],
)
def test_what_is_no_table_of_a_device_or_a_link_is_refused_in_one_line(tmp_path, text):
    file = tmp_path / "odd.toml"
    file.write_text(text + "\n")
    with pytest.raises(ValueError, match=r"odd\.toml") as caught:
        shipped().extended(file)
    assert "\n" not in str(caught.value)
