"""A refit that is interrupted, damaged on disk, or spread over ranks, against one that nobody disturbed."""

import json
import shlex
import shutil
import signal
import time

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from ladder_residual.adapt.refit import Refit
from ladder_residual.adapt.refit_checkpoint import refit
from ladder_residual.cli.main import app
from ladder_residual.core.config import Wiring
from tests.forked import Program, run_program
from tests.ranks import run_on_ranks
from tests.tiny_models import shard_model, tiny_model

TOKENS = 4096


@pytest.fixture(scope="module")
def undisturbed(ground, tmp_path_factory):
    target = tmp_path_factory.mktemp("refit") / "undisturbed"
    result = refit(ground / "original", target, "ladder:1-4", ground / "train.txt", tokens=TOKENS, device="cpu")
    assert not target.with_name("undisturbed.refit").exists()
    return result, load_file(target / "model.safetensors")


def equal(weights, others):
    return weights.keys() == others.keys() and all(torch.equal(weights[name], others[name]) for name in weights)


def stopped(ground, target, after, source=None):
    """A refit that ends as if killed, after some layers."""
    put, count, source = Refit._layer, iter(range(99)), source or ground / "original"

    def layer(self, index, kept):
        put(self, index, kept)
        if next(count) == after:
            raise InterruptedError("enough")

    Refit._layer = layer
    try:
        with pytest.raises(InterruptedError):
            refit(source, target, "ladder:1-4", ground / "train.txt", device="cpu", tokens=TOKENS)
    finally:
        Refit._layer = put
    return target.with_name(f"{target.name}.refit")


def test_a_killed_refit_goes_on_to_the_same_weights(ground, tmp_path, undisturbed):
    target, kept = tmp_path / "killed", tmp_path / "killed.refit"
    command = f"""convert {ground / "original"} {target} --wiring ladder:1-4 --refit {ground / "train.txt"} --refit-tokens {TOKENS}
        --device cpu"""
    process = Program(*shlex.split(command))
    deadline = time.monotonic() + 200
    while not (kept / "layer-2").exists() and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.002)
    process.kill()
    assert process.returncode == -signal.SIGKILL
    assert (kept / "layer-2" / "complete.json").exists()
    assert not target.exists(), "it had finished"
    again = run_program(*shlex.split(command))
    assert again.returncode == 0, again.stderr[-2000:]
    assert "resume   " in again.stdout
    assert equal(load_file(target / "model.safetensors"), undisturbed[1])
    assert not kept.exists()


def test_a_damaged_layer_is_fitted_again_and_kept_aside(ground, tmp_path, undisturbed, monkeypatch):
    kept = stopped(ground, tmp_path / "out", after=3)
    file = kept / "layer-2" / "found.safetensors"
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)
    fitted, said, solve = [], [], Refit._solve
    monkeypatch.setattr(Refit, "_solve", lambda self, sums, key, *rest: fitted.append(key) or solve(self, sums, key, *rest))
    result = refit(
        ground / "original", tmp_path / "out", "ladder:1-4", ground / "train.txt", tokens=TOKENS, device="cpu", log=said.append
    )
    assert {key.split(".")[2] for key in fitted} == {"2", "4"}
    assert said[0] == f"resume   3 layers are in {kept}"
    assert "the checksum of found.safetensors is wrong): layer 2 is fitted again" in said[1]
    assert equal(load_file(tmp_path / "out" / "model.safetensors"), undisturbed[1])
    assert (result.original, result.refitted, result.projections) == tuple(
        getattr(undisturbed[0], name) for name in ("original", "refitted", "projections")
    )


def test_layers_of_another_refit_are_not_taken(ground, tmp_path):
    kept = stopped(ground, tmp_path / "out", after=2)
    with pytest.raises(ValueError, match=r"keeps the layers of another refit \(text\): delete it, or choose another target"):
        refit(ground / "original", tmp_path / "out", "ladder:1-4", ground / "train.txt", tokens=2048, device="cpu")
    with pytest.raises(ValueError, match=r"another refit \(wiring\)"):
        refit(ground / "original", tmp_path / "out", "ladder:1-3", ground / "train.txt", tokens=TOKENS, device="cpu")
    assert sorted(path.name for path in kept.iterdir()) == ["layer-1", "layer-2", "request.json"]
    shutil.rmtree(kept)
    (tmp_path / "short.txt").write_text("Once upon a time.")
    with pytest.raises(ValueError, match="gives 0 tokens"):
        refit(ground / "original", tmp_path / "out", "ladder", tmp_path / "short.txt", device="cpu")
    assert not kept.exists()


@pytest.mark.parametrize("name", ["precious.safetensors", "layer-1"])
def test_a_directory_of_other_files_is_left_alone(ground, tmp_path, name):
    """Layers whose request is gone are nobody's."""
    kept = tmp_path / "out.refit"
    kept.mkdir()
    (kept / name).write_text("precious")
    with pytest.raises(ValueError, match="holds other files: move them, or choose another target"):
        refit(ground / "original", tmp_path / "out", "ladder:1-4", ground / "train.txt", tokens=TOKENS, device="cpu")
    assert [path.name for path in kept.iterdir()] == [name]
    assert (kept / name).read_text() == "precious"


def test_another_config_is_another_refit(ground, tmp_path):
    source = shutil.copytree(ground / "original", tmp_path / "source")
    kept = stopped(ground, tmp_path / "out", 1, source=source)
    config = source / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"rms_norm_eps": 0.5}))
    with pytest.raises(ValueError, match=r"another refit \(checkpoint\)"):
        refit(source, tmp_path / "out", "ladder:1-4", ground / "train.txt", tokens=TOKENS, device="cpu")
    assert kept.exists()


def on_rank(world, ground, target):
    result = refit(
        ground / "original", target, "ladder:1-4", ground / "train.txt", tokens=TOKENS, device="cpu", log=lambda line: None
    )
    return result.original, result.refitted, result.conversion.after.spec


def test_two_ranks_write_what_one_writes(ground, tmp_path, undisturbed):
    alone, weights = undisturbed
    first, second = run_on_ranks(2, on_rank, ground, tmp_path / "two")
    assert first == second == (pytest.approx(alone.original, abs=1e-4), pytest.approx(alone.refitted, abs=2e-3), "ladder:1-4")
    written = load_file(tmp_path / "two" / "model.safetensors")
    assert written.keys() == weights.keys()
    changed = 0
    for name, tensor in written.items():
        difference = (tensor.float() - weights[name].float()).norm() / weights[name].float().norm()
        assert difference < 5e-3, name
        changed += not torch.equal(tensor, load_file(ground / "original" / "model.safetensors")[name])
    assert changed == alone.projections
    assert not (tmp_path / "two.refit").exists()


def shards(world, family, rows):
    model = shard_model(tiny_model(family), world)
    refitted = Refit(model, Wiring.parse("ladder:1-3", 4), rows)
    kept = {}
    refitted.run(kept)
    return {layer: {name: tensor.numpy() for name, tensor in found.items()} for layer, found in kept.items()}


@pytest.mark.parametrize("family", ["llama", "phi3", "gemma2", "gpt_neox", "starcoder2"])
def test_ranks_find_what_one_process_finds(family):
    """Fused projections, biases that one rank adds, post-norms, fewer KV heads than ranks."""
    rows = torch.randint(3, 96, (16, 24), generator=torch.Generator().manual_seed(1))
    alone: dict = {}
    Refit(tiny_model(family), Wiring.parse("ladder:1-3", 4), rows).run(alone)
    ranks = run_on_ranks(2, shards, family, rows)
    for kept in ranks:
        assert kept.keys() == alone.keys()
        for layer, found in alone.items():
            assert kept[layer].keys() == found.keys()
            for name, tensor in found.items():
                torch.testing.assert_close(torch.from_numpy(kept[layer][name]), tensor, rtol=1e-2, atol=2e-3)


def test_layers_are_chosen_by_what_they_cost_after_the_refit(ground, tmp_path):
    text = str(ground / "train.txt")
    options = ["--layers", "2", "--calibration", str(ground / "heldout.txt"), "--calibration-tokens", "1024", "--device", "cpu"]
    command = ["convert", str(ground / "original"), str(tmp_path / "out"), "--wiring", "auto", *options]
    ran = CliRunner().invoke(app, [*command, "--refit", text, "--refit-tokens", "2048"])
    assert ran.exit_code == 0, ran.output
    assert "chosen   ladder:" in ran.output
    again = CliRunner().invoke(app, [*command, "--overwrite", "--refit", str(ground / "heldout.txt")])
    assert "is measured on too (--calibration, --check): give one of them another text" in str(again.exception)
    assert " projections on 2,048 tokens" in ran.output
    plain = CliRunner().invoke(app, [*command[:2], str(tmp_path / "plain"), *command[3:]])
    assert plain.exit_code == 0, plain.output

    def singles(folder):
        return [entry["kl"] for entry in json.loads((tmp_path / folder / "selection.json").read_text())["single"]]

    assert sum(singles("out")) < 0.8 * sum(singles("plain"))
    assert not (tmp_path / "out.refit").exists()


@pytest.mark.parametrize("options", [["--wiring", "ladder"], ["--wiring", "auto", "--refit", "x.txt"]])
def test_ranks_for_what_takes_one_process_are_refused(options, ground, tmp_path):
    ran = CliRunner().invoke(app, ["convert", str(ground / "original"), str(tmp_path / "out"), "--tp", "2", *options])
    assert "--tp 2 is for --refit with a wiring that is named" in str(ran.exception)
