"""The package graph of docs/architecture.md, read off the import statements: `python -m tests.test_layers` prints it."""

import ast
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "ladder_residual"
# Suites over several modules of their folder; every other test lies under the path of the module it tests.
SUITES = {
    "adapt/test_quantised.py",
    "adapt/test_ranks.py",
    "cli/test_mistakes.py",
    "engine/kernels/test_compile_for_hopper.py",
    "engine/test_reference.py",
    "models/quantization/test_bad_checkpoints.py",
    "models/quantization/test_hostile.py",
    "models/test_hostile_checkpoints.py",
    "models/test_tensor_parallel.py",
}


def imports_of(path):
    """(module, names) of every import of this project in a file, inside functions too; relative ones are resolved."""
    package = list(path.relative_to(ROOT / "src").parts[:-1])
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, ()) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            yield ".".join([*above, *([node.module] if node.module else [])]), tuple(alias.name for alias in node.names)


def source_files():
    return [path for path in sorted(PACKAGE.rglob("*.py")) if "assets" not in path.parts]


def package_graph():
    """Package -> the packages it imports from; modules beside the packages (``__init__``, ``__main__``) are left out."""
    packages = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()}
    graph = {name: set() for name in packages}
    for path in source_files():
        here = path.relative_to(PACKAGE).parts[0]
        for module, names in imports_of(path):
            parts = module.split(".")
            if parts[0] != "ladder_residual" or here not in packages:
                continue
            graph[here].update({parts[1]} if len(parts) > 1 else packages.intersection(names))
    return {name: found - {name} for name, found in graph.items()}


def layers():
    contract = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"][0]
    return [[name.strip() for name in layer.split("|")] for layer in contract["layers"]]


def test_packages_import_only_from_layers_below():
    height = {name: -index for index, layer in enumerate(layers()) for name in layer}
    graph = package_graph()
    assert graph.keys() == height.keys(), "every package has a layer in pyproject.toml"
    upwards = [f"{name} imports {other}" for name in graph for other in graph[name] if height[other] >= height[name]]
    assert not upwards  # so there is no cycle either


def test_nothing_installed_imports_the_lab_or_the_tests():
    found = [f"{path.name}: {module}" for path in source_files() for module, _ in imports_of(path)]
    assert not [line for line in found if line.split(": ")[1].split(".")[0] in ("lab", "tests")]


def test_no_private_name_crosses_a_file():
    def private(name):
        return name.startswith("_") and not name.startswith("__")

    crossing = []
    for path in [*source_files(), *sorted((ROOT / "lab").rglob("*.py"))]:
        if "assets" in path.parts:
            continue
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and (node.level or (node.module or "").startswith(("ladder_residual", "lab"))):
                crossing += [f"{path.relative_to(ROOT)}: {alias.name}" for alias in node.names if private(alias.name)]
                crossing += [
                    f"{path.relative_to(ROOT)}: {node.module}" for part in (node.module or "").split(".") if private(part)
                ]
    assert not crossing


def test_tests_lie_under_the_path_of_what_they_test():
    """Those beside the folders are about the whole project."""
    tests = ROOT / "tests"
    found = {path.relative_to(tests): path.name.removeprefix("test_") for path in tests.glob("*/**/test_*.py")}
    of_packages = {path: name for path, name in found.items() if (PACKAGE / path.parts[0]).is_dir()}
    assert {str(path) for path, name in of_packages.items() if not (PACKAGE / path.with_name(name)).exists()} <= SUITES


def test_no_test_imports_another():
    """What several share is a fixture or stands in a file without tests. The suite for GPUs is one program in several files."""
    found = [
        f"{path.name}: {node.module}"
        for path in (ROOT / "tests").rglob("test_*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and ".test_" in (node.module or "") and not node.module.startswith("tests.gpu.")
    ]
    assert not found


if __name__ == "__main__":
    found = package_graph()
    for layer in layers():
        for name in layer:
            print(f"{name:12} <- {', '.join(sorted(found[name]))}")
