"""Files that may come from someone else are opened in few places, each of which is named here: nothing else unpickles or runs them."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "ladder_residual"
# What is called, by its full name or by the end of it -> the files that may call it, and the keyword that must be there.
LOADERS = {
    "torch.load": ({"adapt/checkpoints.py"}, ("weights_only", True)),
    "torch.distributed.checkpoint.load": (
        {"train/dcp_checkpoint.py"},
        None,
    ),  # with a reader that builds nothing a pickle asks for
    ".from_pretrained": ({"data/tokenizer.py"}, ("trust_remote_code", False)),
    "safetensors.safe_open": ({"models/checkpoint_reader.py"}, None),
    # An adapter, and what a refit found for a layer; nothing but safetensors.
    "safetensors.torch.load_file": ({"adapt/checkpoints.py", "adapt/refit_layers.py"}, None),
    "datasets.load_dataset": ({"data/sources.py"}, None),
    "torch.distributed.checkpoint.FileSystemReader": (set(), None),
    "torch.distributed.checkpoint.load_state_dict": (set(), None),
    "torch.serialization.load": (set(), None),
    "torch.jit.load": (set(), None),
    "torch.hub.load": (set(), None),
    "safetensors.torch.load": (set(), None),
    "safetensors.torch.load_model": (set(), None),
    "safetensors.numpy.load_file": (set(), None),
    "numpy.load": (set(), None),
    "runpy.run_path": (set(), None),
    "importlib.util.spec_from_file_location": (set(), None),
    "os.system": (set(), None),
    "eval": (set(), None),
    "exec": (set(), None),
}
# Modules that build whatever a file asks for -> the files that may import them: for an exception, and to refuse what is asked for.
PICKLES = {"pickle": {"adapt/checkpoints.py", "train/dcp_checkpoint.py"}}
PICKLES |= {name: set() for name in ("marshal", "shelve", "dill", "cloudpickle", "joblib", "yaml")}


def looked_at(source):
    """Imported modules, and calls by full names with their constant keywords, whatever the import called them."""
    names, modules, calls = {}, set(), []
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
            names |= {
                alias.asname or alias.name.partition(".")[0]: alias.name if alias.asname else alias.name.partition(".")[0]
                for alias in node.names
            }
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            modules.add(node.module)
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            first, dot, rest = ast.unparse(node.func).partition(".")
            keywords = {word.arg: word.value.value for word in node.keywords if isinstance(word.value, ast.Constant)}
            calls.append((names.get(first, first) + dot + rest, keywords))
    return modules, calls


FILES = {str(path.relative_to(PACKAGE)): looked_at(path.read_text(encoding="utf-8")) for path in sorted(PACKAGE.rglob("*.py"))}


@pytest.mark.parametrize("loader", LOADERS)
def test_only_these_files_open_what_others_wrote(loader):
    files, required = LOADERS[loader]
    found = [(file, keywords) for file, (_, calls) in FILES.items() for name, keywords in calls if is_loader(name, loader)]
    assert {file for file, _ in found} == files
    for file, keywords in found:
        assert required is None or keywords.get(required[0]) is required[1], f"{file}: {loader} without {required[0]}"


def is_loader(name, loader):
    return name.endswith(loader) if loader.startswith(".") else name == loader


@pytest.mark.parametrize("module", PICKLES)
def test_only_these_files_know_pickles(module):
    assert {file for file, (modules, _) in FILES.items() if module in {name.partition(".")[0] for name in modules}} == PICKLES[
        module
    ]


@pytest.mark.parametrize(
    ("source", "loader"),
    [
        ("import torch\ntorch.load(x)", "torch.load"),
        ("import torch as t\nt.load(x)", "torch.load"),
        ("def f():\n    from torch import load as l\n    l(x)", "torch.load"),
        ("import torch.distributed.checkpoint as dcp\ndcp.load(x)", "torch.distributed.checkpoint.load"),
        ("from torch.distributed import checkpoint\ncheckpoint.load(x)", "torch.distributed.checkpoint.load"),
        ("import torch\ntorch.distributed.checkpoint.load(x)", "torch.distributed.checkpoint.load"),
        ("import numpy as np\nnp.load(x)", "numpy.load"),
        ("from transformers import AutoModel\nAutoModel.from_pretrained(x)", ".from_pretrained"),
    ],
)
def test_a_loader_is_seen_under_any_name(source, loader):
    assert any(is_loader(name, loader) for name, _ in looked_at(source)[1])
