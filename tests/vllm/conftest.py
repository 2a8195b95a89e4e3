"""Run by `make test-vllm`, in the environment lab/make-vllm-env.sh makes. Elsewhere nothing here is collected."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from pathlib import Path

import pytest

# This folder is called vllm too, and a path that leads here makes it a namespace package: only a real one has an origin.
_spec = importlib.util.find_spec("vllm")
if _spec is None or _spec.origin is None:
    collect_ignore_glob = ["test_*.py"]
else:
    sys.path.insert(0, str(Path(__file__).parent))
    # Triton reads it as kernels are defined, its own among them. Engines run in processes of their own, without it.
    os.environ["TRITON_INTERPRET"] = "1"
    importlib.import_module("ladder_residual.engine.kernels.join")
    del os.environ["TRITON_INTERPRET"]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints, vLLM's compile cache and logs of this run."""
    return tmp_path_factory.mktemp("serving")
