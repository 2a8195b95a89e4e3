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


def test_loads_without_importing_us_through_the_stub_and_only_then(saved, tmp_path):
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    load = f"from transformers import AutoModelForCausalLM as A; m = A.from_pretrained({str(tmp_path)!r}, trust_remote_code=%s)"
    trusted = in_fresh_process(load % True + "; print(type(m).__name__, m.config.wiring)")
    assert trusted.stdout.split() == ["LadderLlamaForCausalLM", "ladder:2-3"], trusted.stderr
    refused = in_fresh_process(load % False)
    assert refused.returncode != 0
    assert "trust_remote_code" in refused.stderr
    # Checkpoints written before models/ was a package: their stub imports another name.
    stub = (tmp_path / "ladder_stub.py").read_text()
    earlier = stub.replace("from ladder_residual.models import hf as _model", "from ladder_residual import model as _model")
    assert earlier != stub
    (tmp_path / "ladder_stub.py").write_text(earlier)
    trusted = in_fresh_process(load % True + "; print(type(m).__name__, type(m).__module__, m.config.wiring)")
    assert trusted.stdout.split() == ["LadderLlamaForCausalLM", "ladder_residual.models.hf", "ladder:2-3"], trusted.stderr
    # Without the package the stub says what to install.
    hidden = in_fresh_process("import sys; sys.modules['ladder_residual'] = None; " + load % True)
    assert "pip install ladder-residual" in hidden.stderr


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
