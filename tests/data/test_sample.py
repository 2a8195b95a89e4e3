"""A model's own samples: batched sampling equals the plain forward, chats follow the template, nothing is lost."""

import json
import os
import signal
import time

import pytest
import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from ladder_residual.cli.main import app
from ladder_residual.common.locks import Lock
from ladder_residual.data.batched_sampling import ATTENTION, EMPTY, WINDOW, BatchedSampler, Start, register_attention
from ladder_residual.data.sample import Memory, Sampler, SampleSettings, load_for_sampling, to_lines
from ladder_residual.data.tokenizer import ChatForm, end_of_document, first_token
from ladder_residual.distributed.world import World
from ladder_residual.models.hf import rewire
from tests.forked import Program
from tests.tiny_models import FAMILY_NAMES, VOCAB, random_ids, tiny_model

NO_CHAT = torch.zeros(64, dtype=torch.bool)


class Watched(BatchedSampler):
    """Keeps the logits of every step."""

    def _draw(self, logits):
        self.__dict__.setdefault("logits", []).append(logits.clone())
        return super()._draw(logits)


def decoder(model, kind=BatchedSampler, **options):
    given = dict(rows=6, length=WINDOW + 9, temperature=1.0, stops=set(), vocabulary=VOCAB, smallest=1)
    return kind(model, **given | options)


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_sampled_logits_are_those_of_a_plain_forward(family):
    """The slow twin: the whole sequence at once, with the family's own attention and no cache."""
    model = tiny_model(family)
    own = model.config._attn_implementation
    length = min(getattr(model.config, "sliding_window", None) or WINDOW + 9, WINDOW + 9)
    if not getattr(model.config, "attn_logit_softcapping", None):
        register_attention()
        model.set_attn_implementation(ATTENTION)
    watched = decoder(model, Watched, rows=5, length=length)
    rows = torch.stack(watched.sample(Start(random_ids(5, 3), NO_CHAT[:5]), seed=0))
    assert rows.shape == (5, length)
    assert torch.equal(rows[:, :3], random_ids(5, 3))
    model.set_attn_implementation(own)
    with torch.no_grad():
        expected = model(rows).logits[:, :-1]
    torch.testing.assert_close(torch.stack(watched.logits, 1), expected, atol=2e-5, rtol=1e-4)


def test_a_rewired_model_is_sampled_with_its_wiring():
    model = rewire(tiny_model(), "ladder:last-half")
    watched = decoder(model, Watched, rows=3, length=12)
    rows = torch.stack(watched.sample(Start(random_ids(3, 1), NO_CHAT[:3]), seed=0))
    with torch.no_grad():
        expected, standard = model(rows).logits[:, :-1], tiny_model()(rows).logits[:, :-1]
    torch.testing.assert_close(torch.stack(watched.logits, 1), expected, atol=2e-5, rtol=1e-4)
    assert (expected - standard).abs().max() > 0.01


def test_draws_follow_the_probabilities():
    drawing = decoder(tiny_model(), temperature=0.5)
    logits = torch.tensor([0.0, 1.0, 2.0, -5.0])
    torch.manual_seed(0)
    drawn = drawing._draw(logits.repeat(40_000, 1))
    frequencies = torch.bincount(drawn, minlength=4) / 40_000
    torch.testing.assert_close(frequencies, (logits / 0.5).softmax(-1), atol=0.01, rtol=0)


class Scripted(torch.nn.Module):
    """Says what its script says: row r's token at position p is ``script[r][p]``; its cache is checked to follow the rows."""

    def __init__(self, script):
        super().__init__()
        self.script, self.device, self.dtype = script, torch.device("cpu"), torch.float32
        self.config = type("Config", (), {"num_hidden_layers": 1})()
        self.widths = []

    def forward(self, input_ids, attention_mask, position_ids, past_key_values, use_cache):
        rows, position = len(input_ids), int(position_ids[0])
        # The first token of a row is its number, and the cache remembers it.
        keys, _ = past_key_values.update(input_ids.float()[:, None, :, None], input_ids.float()[:, None, :, None], 0)
        names = keys[:, 0, 0, 0].long()
        self.widths.append(rows)
        logits = torch.full((rows, 1, 50), -1e9)
        for row, name in enumerate(names.tolist()):
            logits[row, 0, self.script[name][min(position, len(self.script[name]) - 1)]] = 0
        return type("Output", (), {"logits": logits})()


@pytest.mark.parametrize("smallest", [1, 64])
def test_rows_end_and_the_batch_is_squeezed_without_mixing_them_up(smallest):
    stop, rows = 49, 8
    lengths = [3, 60, 5, 20, 40, 6, 7, 25]
    script = {name: [(name * 7 + at) % 40 + 1 for at in range(length)] + [stop] for name, length in enumerate(lengths)}
    model = Scripted(script)
    sampled = BatchedSampler(model, rows=rows, length=50, temperature=1.0, stops={stop}, vocabulary=50, smallest=smallest)
    for _ in range(2):  # a decoder is used again
        out = sampled.sample(Start(torch.arange(rows)[:, None], NO_CHAT[:rows]), seed=0)
        for name, row in enumerate(out):
            assert row.tolist() == [name, *script[name]][:50]
    assert (set(model.widths) == {8, 4, 2, 1}) if smallest == 1 else (set(model.widths) == {8})


def test_it_stops_as_soon_as_all_rows_have_ended():
    model = Scripted({name: [49] for name in range(4)})
    sampled = BatchedSampler(model, rows=4, length=400, temperature=1.0, stops={49}, vocabulary=50, smallest=1)
    assert [row.tolist() for row in sampled.sample(Start(torch.arange(4)[:, None], NO_CHAT[:4]), 0)] == [
        [n, 49] for n in range(4)
    ]
    assert len(model.widths) < 40


def test_a_chat_writes_the_users_turn_then_the_forced_header_then_its_answer():
    turn_over, stop, header = 45, 49, (31, 32, 33)
    script = {
        0: [1, 2, turn_over, 9, 9, 9, 20, 21, turn_over, 22, stop],  # in the answer an end of turn is no longer a border
        1: [1, 2, 3, 4, turn_over, 9, 9, 9, 30, stop],
        2: [turn_over, 8, stop],  # plain: the end of a turn means nothing
        3: [1, 2, stop],  # ends before its turn does
    }
    model = Scripted(script)
    sampled = BatchedSampler(model, rows=4, length=20, temperature=1.0, stops={stop}, vocabulary=50, smallest=1)
    chat = torch.tensor([True, True, False, True])
    prompts = torch.tensor([[0, 40], [1, 40], [2, EMPTY], [3, 40]])
    for name in (0, 1, 3):
        script[name].insert(0, 0)  # position 0 predicts the given 40
    rows = [row.tolist() for row in sampled.sample(Start(prompts, chat, turn_over, header), 0)]
    assert rows[0] == [0, 40, 1, 2, turn_over, *header, 20, 21, turn_over, 22, stop]
    assert rows[1] == [1, 40, 1, 2, 3, 4, turn_over, *header, 30, stop]
    assert rows[2] == [2, turn_over, 8, stop]
    assert rows[3] == [3, 40, 1, 2, stop]


@pytest.fixture
def chat_tokenizer():
    words = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "[UNK]", "user", "assistant", "hello", "there", "\n"]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(pattern=Regex(r"[\n ]"), behavior="isolated")
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        bos_token="<|im_start|>",
        additional_special_tokens=["<|endoftext|>"],
    )
    fast.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    return fast


def test_the_form_of_a_chat_is_read_off_its_template(chat_tokenizer):
    form = ChatForm.of(chat_tokenizer)
    assert chat_tokenizer.convert_ids_to_tokens(list(form.header)) == ["<|im_start|>", "user", "\n"]
    assert chat_tokenizer.convert_ids_to_tokens([form.end_of_turn, *form.answer_header]) == [
        *("<|im_end|>", "\n", "<|im_start|>", "assistant", "\n")
    ]
    assert end_of_document(chat_tokenizer) == first_token(chat_tokenizer) == 0  # not the end of a turn
    chat_tokenizer.chat_template = "{% for m in messages %}[INST] {{ m['content'] }} [/INST]{% endfor %}"
    with pytest.raises(ValueError, match="no special token"):
        ChatForm.of(chat_tokenizer)
    chat_tokenizer.chat_template = None
    with pytest.raises(ValueError, match="no chat template; use --start plain"):
        ChatForm.of(chat_tokenizer)


def test_mixed_samples_begin_as_their_kind_does(chat_tokenizer):
    model = tiny_model(vocab_size=16, pad_token_id=0)
    settings = SampleSettings(tokens=1, batch=6, length=30, start="mixed", random_first=True, seed=5)
    batch = next(Sampler(model, chat_tokenizer, settings).batches())
    header = list(ChatForm.of(chat_tokenizer).header)
    assert [sample.start for sample in batch] == ["plain", "chat"] * 3
    for sample in batch:
        assert max(sample.ids) < 9  # the model's vocabulary is larger than the tokenizer's
        assert (sample.ids[:3] == header) == (sample.start == "chat")
        assert sample.complete == (sample.ids[-1] in (0, 2))
    lines = [json.loads(line) for line in to_lines(batch, chat_tokenizer, "both", "d")]
    assert "<|im_start|>" in lines[1]["text"]
    assert [line["ids"] for line in lines] == [sample.ids for sample in batch]


@pytest.fixture(scope="module")
def demo(request):
    from ladder_residual.bench.demo import demo_directory

    return load_for_sampling(str(demo_directory()), World())


def test_the_same_seed_gives_the_same_samples_and_another_one_others(demo):
    def drawn(seed, batches=2):
        source = Sampler(*demo, SampleSettings(tokens=1, batch=5, length=24, seed=seed)).batches()
        return [sample.ids for _ in range(batches) for sample in next(source)]

    first = drawn(0)
    assert len(first) == 10
    assert first == drawn(0)
    assert not {tuple(ids) for ids in first} & {tuple(ids) for ids in drawn(1)}


def test_demo_samples_are_stories(demo):
    """Likely under the model itself: about as likely as its own entropy says, not as random tokens are."""
    model, tokenizer = demo
    batch = next(Sampler(model, tokenizer, SampleSettings(tokens=1, batch=16, length=80)).batches())
    losses = []
    with torch.no_grad():
        for sample in batch:
            ids = torch.tensor([sample.ids])
            logits = model_logits(model, ids)
            losses.append(torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:]))
    assert 0.5 < float(torch.stack(losses).mean()) < 2.5  # ln 512 is 6.2


def model_logits(model, ids):
    model.set_attn_implementation("sdpa")
    try:
        return model(ids).logits
    finally:
        model.set_attn_implementation(ATTENTION)


def test_memory_is_predicted_and_refused(demo, monkeypatch):
    model, tokenizer = demo
    settings = SampleSettings(tokens=1, batch=8, length=100)
    memory = Memory.predicted(model, settings)
    sampler = Sampler(model, tokenizer, settings)
    next(sampler.batches())
    layers = sampler.decoder.layers
    assert memory.cache == sum(tensor.nbytes for layer in layers for tensor in (layer.keys, layer.values))
    monkeypatch.setattr("ladder_residual.data.sample.free_bytes", lambda device: memory.cache)
    with pytest.raises(ValueError, match=r"needs .* GiB of cache .* are free on cpu; use --batch \d"):
        Sampler(model, tokenizer, settings)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tokens", "0"], "--tokens must be at least 1"),
        (["--tokens", "5", "--temperature", "0"], "above 0"),
        (["--tokens", "5", "--start", "poem"], "choose plain, chat, mixed"),
        (["--tokens", "5", "--start", "chat"], "no chat template"),
        (["--tokens", "5", "--length", "513"], "context of 512"),
        (["--tokens", "5", "--write", "x"], "choose both, ids, text"),
        (["--tokens", "5", "--device", "tpu"], "unknown device"),
    ],
)
def test_wrong_options_are_named(demo_dir, tmp_path, options, message):
    done = CliRunner().invoke(app, ["data", "sample", str(demo_dir), str(tmp_path / "out.jsonl"), *options])
    assert isinstance(done.exception, ValueError)
    assert message in str(done.exception)
    assert not (tmp_path / "out.jsonl").exists()


def test_an_existing_file_is_kept(demo_dir, tmp_path):
    out = tmp_path / "out.jsonl"
    out.write_text("precious")
    done = CliRunner().invoke(app, ["data", "sample", str(demo_dir), str(out), "--tokens", "5"])
    assert "exists; choose another name or use --overwrite" in str(done.exception)
    assert out.read_text() == "precious"


def test_a_second_writer_of_the_same_file_is_refused(demo_dir, tmp_path, monkeypatch):
    out, command = tmp_path / "out.jsonl", ["data", "sample", str(demo_dir), str(tmp_path / "out.jsonl"), "--tokens", "5"]
    with Lock(out):
        done = CliRunner().invoke(app, command)
    assert f"{out} is in use by process {os.getpid()}" in str(done.exception)
    assert not out.exists()
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "sampling is done by one process; 2 were started" in str(CliRunner().invoke(app, command).exception)


def test_samples_go_into_a_pipe(demo_dir, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    words = ["data", "sample", demo_dir, "/dev/stdout", "--overwrite", "--tokens", "5", "--length", "8", "--batch", "2"]
    program = Program(*words, stdout=tmp_path / "pipe")
    *samples, summary = (tmp_path / "pipe").read_text().splitlines()
    assert program.wait(60) == 0, program.stderr
    assert all(json.loads(line)["ids"] for line in samples)
    assert summary.startswith("/dev/stdout: 2 samples")


def test_a_missing_directory_is_named(demo_dir, tmp_path):
    out = tmp_path / "missing" / "out.jsonl"
    done = CliRunner().invoke(app, ["data", "sample", str(demo_dir), str(out), "--tokens", "5"])
    assert f"cannot write {out}: there is no directory {out.parent}; choose another target" in str(done.exception)


def test_an_interrupt_keeps_finished_batches(demo_dir, tmp_path):
    out = tmp_path / "out.jsonl"
    process = Program("data", "sample", demo_dir, out, "--tokens", "100000000", "--batch", "8", "--length", "16")
    try:
        deadline = time.monotonic() + 120
        while (not out.exists() or out.stat().st_size == 0) and time.monotonic() < deadline and process.poll() is None:
            time.sleep(0.05)
        os.kill(process.pid, signal.SIGINT)
        assert process.wait(timeout=60) == 130
    finally:
        process.kill()
    lines = out.read_text(encoding="utf-8").splitlines()
    assert lines
    assert len(lines) % 8 == 0
    assert all(json.loads(line)["ids"] for line in lines)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_recorded_steps_sample_what_plain_ones_do(demo_dir):
    """On the GPU a step is replayed from a CUDA graph; its twin runs the same step as it is. Nearly greedy, so that both agree."""
    model, tokenizer = load_for_sampling(str(demo_dir), World(device=torch.device("cuda", 0)), "float32")
    prompts = torch.stack([torch.full((32,), first_token(tokenizer)), torch.arange(260, 292)], 1)
    rows = []
    for graphs in (True, False):
        sampled = BatchedSampler(
            model, rows=32, length=200, temperature=1e-4, stops={1, 2}, vocabulary=512, smallest=4, graphs=graphs
        )
        rows.append([[row.tolist() for row in sampled.sample(Start(prompts, NO_CHAT[:32]), seed)] for seed in (0, 1)])
        assert any(sampled._captured.values()) == graphs
    assert rows[0] == rows[1]
