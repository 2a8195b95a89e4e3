"""The Auto classes know rewired checkpoints in either order of the imports, and never load one as the plain model."""

import json
import shutil
import subprocess
import sys

import pytest

from ladder_residual import rewire
from tests.tiny_models import tiny_model


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    directory = tmp_path_factory.mktemp("ladder")
    rewire(tiny_model("llama"), "ladder:last-half").save_pretrained(directory)
    return directory


def in_fresh_process(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=180)


# Both refusals come before the class is loaded, so one process can see all three.
THROUGH_THE_STUB = """
import sys
from transformers import AutoModelForCausalLM

def load(**options):
    return AutoModelForCausalLM.from_pretrained({source!r}, **options)

def refusal(**options):
    try:
        load(**options)
    except Exception as error:
        return str(error)

assert "trust_remote_code" in refusal(trust_remote_code=False)
sys.modules["ladder_residual"] = None  # not installed
assert "pip install ladder-residual" in refusal(trust_remote_code=True)
del sys.modules["ladder_residual"]
model = load(trust_remote_code=True)
print(type(model).__name__, type(model).__module__, model.config.wiring)
"""


@pytest.mark.parametrize("earlier", [False, True], ids=["now", "written before models was a package"])
def test_loads_without_importing_us_through_the_stub_and_only_then(saved, tmp_path, earlier):
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    if earlier:
        stub = (tmp_path / "ladder_stub.py").read_text()
        changed = stub.replace("from ladder_residual.models import hf as _model", "from ladder_residual import model as _model")
        assert changed != stub
        (tmp_path / "ladder_stub.py").write_text(changed)
    done = in_fresh_process(THROUGH_THE_STUB.format(source=str(tmp_path)))
    assert done.stdout.split() == ["LadderLlamaForCausalLM", "ladder_residual.models.hf", "ladder:2-3"], done.stderr


def test_a_rewired_checkpoint_never_loads_as_the_plain_model(saved, tmp_path):
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["auto_map"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    done = in_fresh_process(f"from transformers import AutoConfig; AutoConfig.from_pretrained({str(tmp_path)!r})")
    assert done.returncode != 0
    assert "ladder_llama" in done.stderr


@pytest.mark.slow
def test_importing_first_or_last_registers_the_auto_classes(saved):
    use = f"print(AutoModelForCausalLM.from_pretrained({str(saved)!r}).config.wiring)"
    for order in (
        "import ladder_residual; from transformers import AutoModelForCausalLM; ",
        "from transformers import AutoModelForCausalLM; import ladder_residual; ",
        "import ladder_residual; from transformers import AutoConfig, AutoModelForCausalLM; ",
        # Not through the Auto classes: these import them while they are half imported themselves.
        "import ladder_residual; from transformers import LlamaForCausalLM, AutoModelForCausalLM; ",
        "import ladder_residual; from transformers import LlamaConfig, Qwen3ForCausalLM, AutoModelForCausalLM; ",
    ):
        done = in_fresh_process(order + use)
        assert done.stdout.strip() == "ladder:2-3", done.stderr
