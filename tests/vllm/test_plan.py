"""The boundaries between modules follow from the shared wiring functions; no engine is started here."""

from __future__ import annotations

import subprocess
import sys

import pytest

from ladder_residual import Wiring
from ladder_residual.vllm_plugin.plan import Boundary, boundaries

KEPT = {
    "standard": [0, 0, 0, 0, 0, 0, 0, 0],
    "ladder": [1, 1, 1, 1, 1, 1, 1, 0],  # after the last module nothing computes that could hide its sum
    "ladder:1-2": [0, 1, 1, 1, 1, 0, 0, 0],  # the first ladder attention reads the stream before the last standard MLP joined it
    "ladder:0,2": [1, 0, 0, 1, 1, 0, 0, 0],
}


@pytest.mark.parametrize("spec", KEPT)
def test_a_sum_stays_in_flight_exactly_before_a_ladder_module(spec: str) -> None:
    plan = boundaries(Wiring.parse(spec, 4))
    assert [boundary.keep for boundary in plan] == KEPT[spec]
    assert {boundary.join for boundary in plan} == {"sum"}


def test_rank_dependent_wirings() -> None:
    own, mean = Boundary("own", 0), Boundary("mean", 0)
    assert boundaries(Wiring.parse("desync-2x", 2)) == [own, mean, own, mean]
    assert boundaries(Wiring.parse("no-comm", 2)) == [own] * 4
    # Layers 1-2 of four: sums after modules 4 and 8 of the chain; the standard layer above needs one stream again.
    joins = [(boundary.join, boundary.agree) for boundary in boundaries(Wiring.parse("desync-4x:1-2", 4))]
    assert joins == [("sum", False)] * 2 + [("own", False), ("mean", False), ("own", False), ("own", True)] + [("sum", False)] * 2


def test_importing_the_package_does_not_import_vllm() -> None:
    code = "import sys, ladder_residual, ladder_residual.cli; sys.exit('vllm' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_without_vllm_the_plugin_says_so() -> None:
    code = "import sys; sys.modules['vllm'] = None\nimport ladder_residual.vllm_plugin"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode
    assert "needs vLLM" in done.stderr


def test_registering_twice_is_harmless() -> None:
    from vllm import ModelRegistry

    from ladder_residual.vllm_plugin import register

    register()
    register()
    assert "LadderQwen3ForCausalLM" in ModelRegistry.get_supported_archs()
