"""Without a GPU the kernels run on Triton's CPU interpreter; on a GPU they are tested in tests/gpu."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when the kernels are defined: before their import


@pytest.fixture(scope="session")
def interpreter():
    """For tests that run kernels."""
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("on a GPU the kernels are tested in tests/gpu")
    from lab.triton_interpreter import mend_interpreter

    mend_interpreter()
