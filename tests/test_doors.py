"""Files that may come from someone else are opened in few places, each of which is named here: nothing else unpickles or runs them."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "ladder_residual"
# call -> the files that may make it, and the keyword without which it would run what it reads
DOORS = {
    "torch.load": ({"adapt/trainer.py"}, ("weights_only", True)),
    "dcp.load": ({"train/dcp_checkpoint.py"}, None),  # with a reader that builds nothing a pickle asks for
    "from_pretrained": ({"data/tokenizer.py"}, ("trust_remote_code", False)),
    "pickle.load": (set(), None),
    "pickle.loads": (set(), None),
    "numpy.load": (set(), None),
    "np.load": (set(), None),
    "eval": (set(), None),
    "exec": (set(), None),
}


def calls():
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                name = ast.unparse(node.func)
                keywords = {word.arg: word.value.value for word in node.keywords if isinstance(word.value, ast.Constant)}
                yield str(path.relative_to(PACKAGE)), name, keywords


@pytest.mark.parametrize("door", DOORS)
def test_only_these_files_open_what_others_wrote(door):
    files, required = DOORS[door]
    found = [
        (file, keywords)
        for file, name, keywords in calls()
        if name == door or name.endswith(f"Auto{door}") or (door == "from_pretrained" and name.endswith(".from_pretrained"))
    ]
    assert {file for file, _ in found} == files
    for file, keywords in found:
        assert required is None or keywords.get(required[0]) is required[1], f"{file}: {door} without {required[0]}"
