"""Recovery runs on the shipped model: every method, what is written, and what goes wrong."""

import hashlib
import json
import resource
import signal

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from ladder_residual.adapt.checkpoints import checkpoints
from ladder_residual.adapt.run import adapt
from ladder_residual.adapt.settings import DataSource
from ladder_residual.adapt.trainer import AdaptTrainer, Diverged, Stages
from ladder_residual.distributed.world import World
from ladder_residual.models.convert import convert
from ladder_residual.models.finite import NonFiniteError
from ladder_residual.models.loading import load_model
from tests.ranks import run_on_ranks
from tests.tiny_adapt import FAST, losses, run, settings, stop_after_a_checkpoint


def digest(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_distillation_recovers_and_writes_a_plain_checkpoint(ground):
    before = digest(ground / "original" / "model.safetensors")
    result = run(ground, "recovered")
    (text,) = result.after
    assert result.after[text]["kl"] < 0.85 * result.before[text]["kl"]
    assert result.after[text]["loss"] < result.before[text]["loss"]
    assert result.tokens == FAST["tokens"]
    # The student's weights are links to the original's file: it must not have changed.
    assert digest(ground / "original" / "model.safetensors") == before
    model = AutoModelForCausalLM.from_pretrained(ground / "recovered")
    assert model.wiring.spec == "ladder"
    ours = load_model(ground / "recovered")
    ids = torch.tensor([[1, 40, 50, 60], [1, 7, 8, 9]])
    torch.testing.assert_close(model(ids).logits, ours(ids).logits)
    assert (ground / "recovered" / "tokenizer.json").exists()
    assert len(losses(ground, "recovered")) == 12
    assert (ground / "recovered.training" / "tensorboard").is_dir()


def test_accumulated_steps_are_the_same_steps(ground):
    run(ground, "whole", tokens=512 * 3)
    run(ground, "parts", tokens=512 * 3, micro_rows=2)
    whole, parts = losses(ground, "whole"), losses(ground, "parts")
    assert list(parts) == [1, 2, 3]
    assert list(parts.values()) == pytest.approx(list(whole.values()), rel=1e-4)


def test_hidden_states_are_matched(ground):
    run(ground, "hidden", tokens=512 * 8, hidden_weight=10.0, learning_rate=1e-3)
    lines = (ground / "hidden.training" / "log.jsonl").read_text(encoding="utf-8").splitlines()
    distances = [json.loads(line)["distance"] for line in lines]
    assert len(distances) == 8
    assert min(distances[4:]) < 0.95 * distances[0]


def test_sft_and_its_control(ground):
    recovered = run(ground, "sft", method="sft", teacher=None)
    control = run(ground, "control", method="sft", control=True)
    (text,) = recovered.after
    assert recovered.after[text]["loss"] < recovered.before[text]["loss"]
    assert control.before[text]["loss"] < recovered.before[text]["loss"]
    config = json.loads((ground / "control" / "config.json").read_text(encoding="utf-8"))
    assert config["model_type"] == "llama"  # the unchanged architecture, loadable by anyone
    assert "wiring" not in config


def test_lora_merges_into_plain_weights(ground):
    result = run(ground, "lora", method="lora", learning_rate=1e-2, lora_rank=4)
    (text,) = result.after
    assert result.after[text]["kl"] < 0.95 * result.before[text]["kl"]
    model = load_model(ground / "lora")
    assert not any("lora" in name for name, _ in model.named_parameters())
    assert not list((ground / "lora").glob("adapter*"))


def test_muon_recovers_too(ground):
    result = run(ground, "muon", optimizer="muon", learning_rate=1e-2, other_rate=0.2, tokens=512 * 8)
    (text,) = result.after
    assert result.after[text]["kl"] < 0.85 * result.before[text]["kl"]


def test_layers_are_switched_over_in_stages(ground):
    lines = []
    result = adapt(settings(ground, "stages", stages=("ladder:3-4", "ladder:1-4"), stages_share=0.5), World(), lines.append)
    stages = [line.split()[1] for line in lines if line.startswith("stage ")]
    assert stages == ["ladder:3-4", "ladder:1-4", "ladder"]
    config = json.loads((result.output / "config.json").read_text(encoding="utf-8"))
    assert config["wiring"] == "ladder"
    assert config["use_cache"] is True  # the Trainer switches it off while it trains; whoever generates wants it
    short = run(ground, "short", tokens=512, stages=("ladder:3-4", "ladder:1-4"))
    assert json.loads((short.output / "config.json").read_text(encoding="utf-8"))["wiring"] == "ladder"
    with pytest.raises(ValueError, match="no step for the last stage"):
        settings(ground, "x", stages=("ladder:3-4",), stages_share=1.0)
    plan = Stages(("a", "b"), "c", 0.5, lines.append)
    assert [plan.at(progress) for progress in (0, 0.2, 0.25, 0.49, 0.5, 1)] == ["a", "a", "b", "b", "c", "c"]


@pytest.mark.parametrize("method", ["distill", "lora"])
def test_the_seed_decides(ground, method):
    """Rows and their order; with LoRA also where the adapters begin, which the first step cannot show."""
    names = [f"{method}-seed-{which}" for which in "abc"]
    for before, (name, seed) in enumerate(zip(names, (1, 1, 2), strict=True)):
        torch.manual_seed(before)  # what was drawn before has no say
        run(ground, name, tokens=512 * 3, seed=seed, method=method, learning_rate=1e-2, lora_rank=4)
    first, again, other = (losses(ground, name) for name in names)
    assert first == again != other
    assert first[3] != other[3]


def test_a_lora_run_resumes_exactly(ground):
    changes = dict(method="lora", lora_rank=4, learning_rate=1e-2, save_every=2, tokens=512 * 4)
    run(ground, "lora-unbroken", **changes)
    assert stop_after_a_checkpoint(ground, "lora-broken", **changes) == "stopped"
    logs = [ground / f"lora-{name}.training" / "heldout.jsonl" for name in ("unbroken", "broken")]
    logs[1].write_text(logs[1].read_text() + '{"step": 3, "te')  # a crash cuts a line
    run(ground, "lora-broken", **changes)
    assert len({tuple(json.loads(line)["step"] for line in log.read_text().splitlines()) for log in logs}) == 1
    assert losses(ground, "lora-broken") == losses(ground, "lora-unbroken")
    assert digest(ground / "lora-broken" / "model.safetensors") == digest(ground / "lora-unbroken" / "model.safetensors")


def test_a_run_on_a_hub_dataset_resumes_exactly_and_without_the_hub(ground, hub, monkeypatch):
    stories = (ground / "train.txt").read_text(encoding="utf-8").split("\n\n<|endoftext|>\n")
    for name in ("stories", "others"):
        (hub / name).mkdir()
        for half in range(2):
            rows = [json.dumps({"text": story}) + "\n" for story in stories[half::2] * 20]
            (hub / name / f"train-{half}.jsonl").write_text("".join(rows), encoding="utf-8")
    options = dict(data=(DataSource("owner/stories"),), heldout=("owner/others",), tokens=512 * 4, save_every=2)
    whole = run(ground, "hub-whole", evaluate_tokens=1024, **options)
    assert whole.after["others"]["tokens"] == 1024
    packed = [path.stat().st_size // 4 // 64 for path in (ground / "hub-whole.training" / "rows").glob("*/ids")]
    assert sorted(packed) == [16, 32]  # of thousands: those that are measured, and those of 4 steps
    assert stop_after_a_checkpoint(ground, "hub-broken", **options) == "stopped"
    monkeypatch.setattr("datasets.load_dataset", lambda *arguments, **options: pytest.fail("the rows are on disk"))
    run(ground, "hub-broken", **options)
    assert losses(ground, "hub-broken") == losses(ground, "hub-whole")
    assert list(losses(ground, "hub-whole")) == [1, 2, 3, 4]


def test_a_loss_that_is_no_number_stops_the_run_and_keeps_the_last_good_checkpoint(ground):
    with pytest.raises(Diverged, match=r"since step (\d+).*last good checkpoint is .*checkpoint-\d+") as caught:
        run(ground, "diverged", learning_rate=1e30, warmup=4.0, save_every=1, keep=3, schedule="constant")
    step = int(str(caught.value).split("since step ")[1].split(":")[0])
    kept = checkpoints(ground / "diverged.training")
    assert kept
    assert max(int(path.name.split("-")[1]) for path in kept) < step - 1 or step == 2
    weights = load_model(kept[-1]).state_dict()
    assert all(torch.isfinite(tensor).all() for tensor in weights.values())
    assert not (ground / "diverged").exists()


def _run_until_the_disk_is_full(world, ground):
    """Files may be no larger than this from step 4 on: the limit is the process's, so it is one of its own."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    save = AdaptTrainer._save_checkpoint

    def limited(trainer, *arguments):
        if trainer.state.global_step == 4:
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        save(trainer, *arguments)

    AdaptTrainer._save_checkpoint = limited
    with pytest.raises(ValueError, match="could not save") as caught:
        run(ground, "full", world, save_every=2, heldout=())
    return str(caught.value)


def test_a_disk_that_is_full_leaves_the_old_checkpoint_intact(ground):
    (refused,) = run_on_ranks(1, _run_until_the_disk_is_full, ground)
    assert "could not save the checkpoint of step 4" in refused
    assert "checkpoint-2 is intact" in refused
    kept = checkpoints(ground / "full.training")
    assert [path.name for path in kept] == ["checkpoint-2"]
    load_model(kept[0])
    assert not (ground / "full.training" / ".saving").exists()
    resumed = run(ground, "full", save_every=2, heldout=())
    assert resumed.steps == 12
    assert min(losses(ground, "full")) == 1


def with_vocabulary(ground, folder):
    convert(ground / "original", folder / "other", "standard", copy=True)
    config = json.loads((folder / "other" / "config.json").read_text(encoding="utf-8"))
    (folder / "other" / "config.json").write_text(json.dumps(config | {"vocab_size": 600}), encoding="utf-8")
    return str(folder / "other")


def with_tokenizer(ground, folder):
    convert(ground / "original", folder / "other", "standard", copy=True)
    path = folder / "other" / "tokenizer.json"
    tokenizer = json.loads(path.read_text(encoding="utf-8"))
    vocabulary = tokenizer["model"]["vocab"]
    if isinstance(vocabulary, list):
        vocabulary[300], vocabulary[301] = vocabulary[301], vocabulary[300]
    else:
        first, second = list(vocabulary)[300:302]
        vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    path.write_text(json.dumps(tokenizer), encoding="utf-8")
    return str(folder / "other")


def test_weights_that_are_pickled_are_not_opened(ground, tmp_path):
    """Of a teacher or a student, also where they are nothing but tensors."""
    convert(ground / "original", tmp_path / "pickled", "standard", copy=True)
    torch.save(load_model(ground / "original").state_dict(), tmp_path / "pickled" / "pytorch_model.bin")
    (tmp_path / "pickled" / "model.safetensors").unlink()
    for role in ("teacher", "student"):
        with pytest.raises(ValueError, match="has only pickled weights") as caught:
            run(ground, "pickled", **{role: str(tmp_path / "pickled")})
        assert "\n" not in str(caught.value)


def test_a_link_that_leaves_the_student_is_refused_before_training(ground, tmp_path):
    """What it leads to would become a file of the result."""
    convert(ground / "ladder", tmp_path / "student", "ladder", copy=True)
    (tmp_path / "secret").write_text("mine")
    (tmp_path / "student" / "notes.txt").symlink_to(tmp_path / "secret")
    with pytest.raises(ValueError, match=r"notes\.txt is a link that leaves the checkpoint"):
        run(ground, "linked", student=str(tmp_path / "student"))
    assert not (ground / "linked.training").exists()


def test_a_result_that_is_not_finite_is_not_written(ground, tmp_path, monkeypatch):
    """The last update comes after the last loss. A student stored as float16 may overflow."""
    convert(ground / "ladder", tmp_path / "half", "ladder", copy=True)
    weights = tmp_path / "half" / "model.safetensors"
    save_file({name: tensor.half() for name, tensor in load_file(weights).items()}, weights, {"format": "pt"})
    options = dict(student=str(tmp_path / "half"), tokens=512 * 2, save_every=2, heldout=())
    train = AdaptTrainer.train
    for value, message in ((float("nan"), "holds NaN or infinite"), (1e6, r"overflows as torch\.float16")):

        def last_update(trainer, *args, value=value, **kwargs):
            outcome = train(trainer, *args, **kwargs)
            with torch.no_grad():
                trainer.inner.model.norm.weight[3] = value
            return outcome

        monkeypatch.setattr(AdaptTrainer, "train", last_update)
        with pytest.raises(NonFiniteError, match=rf"was not written: model\.norm\.weight {message}.*checkpoint-2 is kept"):
            run(ground, "overflowed", **options)
        assert not (ground / "overflowed").exists()


def test_teachers_of_another_vocabulary_are_refused(ground, tmp_path):
    with pytest.raises(ValueError, match="a vocabulary of 600, student .* one of 512"):
        run(ground, "x", teacher=with_vocabulary(ground, tmp_path / "a"))
    with pytest.raises(ValueError, match="different tokenizers"):
        run(ground, "x", teacher=with_tokenizer(ground, tmp_path / "b"))


def test_rows_longer_than_the_context_are_refused(ground):
    with pytest.raises(ValueError, match="sequence=1024 is longer than the model's context of 512"):
        run(ground, "x", sequence=1024, batch_tokens=1024, tokens=2048)


def test_malformed_and_missing_data_stop_before_any_model_is_loaded(ground, tmp_path):
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"text": "fine"}\n{"text": "fi', encoding="utf-8")
    with pytest.raises(ValueError, match="bad.jsonl, line 2: not JSON"):
        run(ground, "x", data=(DataSource(str(bad)),))
    with pytest.raises(ValueError, match="no data: give --data"):
        run(ground, "x", data=())
    (tmp_path / "short.txt").write_text("Once upon a time", encoding="utf-8")
    with pytest.raises(ValueError, match="less than one step of 8"):
        run(ground, "x", data=(DataSource(str(tmp_path / "short.txt")),), tokens=None)


def test_results_are_never_written_over_something(ground):
    with pytest.raises(ValueError, match="which this run reads"):
        run(ground, "original")
    (ground / "taken").mkdir()
    (ground / "taken" / "file").touch()
    with pytest.raises(ValueError, match="is not empty"):
        run(ground, "taken")


def test_a_run_with_other_settings_is_not_continued(ground):
    run(ground, "first", tokens=512 * 2, save_every=1)
    (ground / "first").rename(ground / "moved")
    with pytest.raises(ValueError, match=r"other settings \(learning_rate\)"):
        run(ground, "first", tokens=512 * 2, save_every=1, learning_rate=1e-4)
    run(ground, "first", tokens=512 * 2, save_every=1, learning_rate=1e-4, resume=False)
