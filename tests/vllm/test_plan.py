"""The boundaries between modules follow from the shared wiring functions; no engine is started here."""

from __future__ import annotations

import subprocess
import sys

import pytest

from ladder_residual import Wiring
from ladder_residual.vllm_plugin.plan import Boundary, boundaries, can_run_in_line, on_one_rank

KEPT = {
    "standard": [0, 0, 0, 0, 0, 0, 0, 0],
    "ladder": [1, 1, 1, 1, 1, 1, 1, 0],  # after the last module nothing computes that could hide its all-reduce
    # The first ladder attention reads the stream before the last standard MLP joined it.
    "ladder:1-2": [0, 1, 1, 1, 1, 0, 0, 0],
    "ladder:0,2": [1, 0, 0, 1, 1, 0, 0, 0],
}


@pytest.mark.parametrize("spec", KEPT)
def test_an_all_reduce_stays_in_flight_exactly_before_a_ladder_module(spec: str) -> None:
    plan = boundaries(Wiring.parse(spec, 4))
    assert [boundary.in_flight for boundary in plan] == KEPT[spec]
    assert {boundary.joins for boundary in plan} == {"reduced"}


def test_rank_dependent_wirings() -> None:
    local, averaged = Boundary("local", 0), Boundary("averaged", 0)
    assert boundaries(Wiring.parse("desync-2x", 2)) == [local, averaged, local, averaged]
    assert boundaries(Wiring.parse("no-comm", 2)) == [local] * 4
    # Layers 1-2 of four: all-reduces after modules 4 and 8 of the chain; the standard layer above needs one stream again.
    reduced, average = [Boundary("reduced", 0)] * 2, Boundary("local", 0, average_streams=True)
    assert boundaries(Wiring.parse("desync-4x:1-2", 4)) == [*reduced, local, averaged, local, average, *reduced]


def test_delayed_joins_in_two_parts() -> None:
    own, reduced = "own first", Boundary("reduced", 0)
    # After the last module nothing is left to wait for later.
    assert boundaries(Wiring.parse("delayed-1", 2)) == [Boundary(own, 1)] * 3 + [reduced]
    assert boundaries(Wiring.parse("delayed-2", 2)) == [Boundary(own, 1), Boundary(own, 2), Boundary(own, 2), reduced]
    # A standard layer waits for all.
    assert boundaries(Wiring.parse("delayed-2:1", 3)) == [reduced, reduced, Boundary(own, 1), reduced, reduced, reduced]


def test_parallel_reduces_once_a_layer() -> None:
    held, reduced = Boundary("with next", 0), Boundary("reduced", 0)
    assert boundaries(Wiring.parse("parallel:1", 3)) == [reduced, reduced, held, reduced, reduced, reduced]


@pytest.mark.parametrize("spec", ["delayed-2", "desync-4x:1-2@2", "no-comm", "standard"])
def test_on_one_rank_every_partial_is_the_reduced_output(spec: str) -> None:
    assert {on_one_rank(boundary) for boundary in boundaries(Wiring.parse(spec, 4))} == {Boundary("reduced", 0)}


def test_on_one_rank_ladder_and_parallel_differ_still() -> None:
    for spec in ("ladder:1-2", "parallel"):
        plan = boundaries(Wiring.parse(spec, 4))
        assert [on_one_rank(boundary) for boundary in plan] == plan


def test_importing_the_package_does_not_import_vllm() -> None:
    code = "import sys, ladder_residual, ladder_residual.cli.main; sys.exit('vllm' in sys.modules)"
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


@pytest.mark.parametrize(
    ("wiring", "possible"),
    [
        ("ladder", True),
        ("ladder:1-2", True),
        ("standard", True),
        ("parallel", False),
        ("delayed-1", False),
        ("desync-2x", False),
    ],
)
def test_outputs_that_join_whole_can_be_reduced_in_line(wiring: str, possible: bool) -> None:
    assert can_run_in_line(boundaries(Wiring.parse(wiring, 4))) == possible
