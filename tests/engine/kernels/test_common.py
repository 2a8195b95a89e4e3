"""What the kernels compare their PDL argument with is the enum that the launcher passes."""

import pytest

from ladder_residual.engine.cuda.pdl import PdlMode


def test_modes_have_the_names_and_values_of_the_enum() -> None:
    pytest.importorskip("triton")
    from ladder_residual.engine.kernels import common

    assert {mode.name: getattr(common, mode.name).value for mode in PdlMode} == {mode.name: int(mode) for mode in PdlMode}
