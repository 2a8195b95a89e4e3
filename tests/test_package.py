"""The installed package: what `pip install .` puts where."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MODULES = sorted(
    ".".join(path.relative_to(ROOT / "src").with_suffix("").parts)
    for path in (ROOT / "src" / "ladder_residual").glob("*.py")
    if path.stem not in ("__init__", "__main__")
)


@pytest.mark.slow
def test_the_wheel_has_everything_it_needs(tmp_path):
    """Built and unpacked elsewhere: the command works from there, with the data the package ships."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "--quiet", "--no-deps", "-w", tmp_path, ROOT], check=True, timeout=300)
    wheel = next(tmp_path.glob("ladder_residual-*.whl"))
    names = set(zipfile.ZipFile(wheel).namelist())
    for path in (ROOT / "src" / "ladder_residual").rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts:
            assert str(path.relative_to(ROOT / "src")) in names
    target = tmp_path / "installed"
    subprocess.run([*pip, "install", "--quiet", "--no-deps", "--target", target, wheel], check=True, timeout=300)
    code = (
        f"import sys; sys.path.insert(0, {str(target)!r}); import ladder_residual, ladder_residual.cli as cli;"
        f"assert ladder_residual.__file__.startswith({str(target)!r}), ladder_residual.__file__;"
        f"sys.argv = ['ladder', 'demo', '--export', {str(tmp_path / 'out')!r}]; cli.main()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
    assert (tmp_path / "out" / "model.safetensors").stat().st_size > 1_000_000


@pytest.mark.slow
@pytest.mark.parametrize("module", MODULES)
def test_every_module_can_be_imported_first(module):
    """No import order is special, and importing starts nothing: no process group, no CUDA context, no thread."""
    code = (
        f"import threading, {module}, sys; torch = sys.modules.get('torch');"
        "assert threading.active_count() == 1, threading.enumerate();"
        "assert torch is None or not torch.distributed.is_initialized();"
        "assert torch is None or not torch.cuda.is_initialized()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
