"""The installed package: what `pip install .` puts where."""

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "ladder_residual"
PACKAGES = sorted(path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists() and path.name != "vllm_plugin")


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
        f"import sys; sys.path.insert(0, {str(target)!r}); import ladder_residual, ladder_residual.cli.main as cli;"
        f"assert ladder_residual.__file__.startswith({str(target)!r}), ladder_residual.__file__;"
        f"sys.argv = ['ladder', 'demo', '--export', {str(tmp_path / 'out')!r}]; cli.main()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
    assert (tmp_path / "out" / "model.safetensors").stat().st_size > 1_000_000


SDIST = [
    "CHANGELOG.md",
    "CITATION.cff",
    "CONTRIBUTING.md",
    "LICENSE",
    "Makefile",
    "NOTICE",
    "README.md",
    "SECURITY.md",
    "constraints.txt",
]
SDIST += [
    "docs/security.md",
    "examples",
    "lab/test-lowest.sh",
    "mkdocs.yml",
    "recipes/train-1b-ladder.toml",
    "results/faults/fuzz.json",
]
SDIST += ["src/ladder_residual/assets/demo/model.safetensors", "tests/tiny_models.py"]


def test_the_source_distribution_holds_the_project(tmp_path):
    """Recipes, documents, exact versions and tests, and nothing that was built."""
    pytest.importorskip("setuptools", minversion="77")
    code = f"from setuptools.build_meta import build_sdist; build_sdist({str(tmp_path)!r})"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, timeout=120)
    (archive,) = tmp_path.glob("ladder_residual-*.tar.gz")
    with tarfile.open(archive) as file:
        names = {name.partition("/")[2] for name in file.getnames()}
    assert [name for name in SDIST if name not in names] == []
    for folder in ("docs", "recipes"):
        held = {
            str(path.relative_to(ROOT))
            for path in (ROOT / folder).rglob("*")
            if path.is_file() and "__pycache__" not in path.parts
        }
        assert held <= names
    assert not [name for name in names if "__pycache__" in name or name.startswith((".venv", "site/"))]


def test_the_wheel_is_the_package_alone():
    """No lab code, no tests, and a size that one person can read."""
    lines = sum(1 for path in PACKAGE.rglob("*.py") for line in path.read_text().splitlines() if line.strip())
    assert lines <= 25_900, f"the installed package has grown to {lines} lines"


@pytest.mark.slow
@pytest.mark.parametrize("package", PACKAGES)
def test_any_package_can_be_imported_first(package):
    """No import order is special, and importing starts nothing: no process group, no CUDA context, no thread."""
    modules = [
        "ladder_residual." + ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        for path in (PACKAGE / package).rglob("*.py")
    ]
    code = (
        f"import importlib, sys, threading; [importlib.import_module(name) for name in {sorted(modules)!r}];"
        "torch = sys.modules.get('torch');"
        "assert threading.active_count() == 1, threading.enumerate();"
        "assert torch is None or not torch.distributed.is_initialized();"
        "assert torch is None or not torch.cuda.is_initialized()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
