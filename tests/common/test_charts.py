"""Charts drawn as SVG."""

import xml.etree.ElementTree as ET

import pytest

from ladder_residual.common.charts import PLANNED, Chart, Series, chart_svg, nice_ticks

SVG = "{http://www.w3.org/2000/svg}"


def test_a_chart_places_points_where_their_values_are():
    chart = Chart("x", "a < b", "x", "y", [Series("line", [(0, 1), (10, 3)], PLANNED)])
    root = ET.fromstring(chart_svg(chart))
    dots = [(float(c.get("cx")), float(c.get("cy"))) for c in root.iter(f"{SVG}circle")]
    assert dots[0][0] < dots[1][0]
    assert dots[0][1] > dots[1][1]  # larger is higher
    with pytest.raises(ValueError, match="no points"):
        chart_svg(Chart("x", "t", "x", "y", [Series("none", [])]))


@pytest.mark.parametrize(("low", "high"), [(1.0, 1.5), (0.97, 1.04), (4.0, 17.5), (41.65, 56.24)])
def test_ticks_are_round_and_cover_the_data(low, high):
    ticks = nice_ticks(low, high)
    assert ticks[0] <= low
    assert ticks[-1] >= high
    assert 3 <= len(ticks) <= 8
