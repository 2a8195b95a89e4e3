"""Scoring with torch alone: equal to a token-by-token twin, on any batch, order and number of ranks; the files between machines."""

import json
import random
import sys

import pytest
import torch
from torch.nn import functional as F

from ladder_residual.evaluate.requests import Request, Requests, Score, load_scores
from ladder_residual.evaluate.score import main, perplexity, perplexity_of, score, score_all, windows_of
from ladder_residual.models.loading import load_model
from tests.forked import run_program
from tests.ranks import run_on_ranks


@pytest.fixture(scope="module")
def model(demo_dir):
    return load_model(demo_dir, wiring="ladder:last-half")


def some_requests(seed=0, count=12, vocabulary=512):
    """Contexts of many lengths, each with answers of several tokens and with answers of one."""
    draw = random.Random(seed)
    requests = []
    for _ in range(count):
        context = [draw.randrange(vocabulary) for _ in range(draw.randint(1, 40))]
        requests += [Request(context, [draw.randrange(vocabulary) for _ in range(draw.randint(2, 7))]) for _ in range(3)]
        requests += [Request(context, [token]) for token in (5, 6, 7, 8)]
    return requests


@torch.no_grad()
def score_slowly(model, request):
    """One request, one token at a time."""
    tokens, total, greedy = list(request.context), 0.0, True
    for token in request.continuation:
        logits = model(torch.tensor([tokens])).logits[0, -1]
        total += F.log_softmax(logits.double(), -1)[token].item()
        greedy &= logits.argmax().item() == token
        tokens.append(token)
    return Score(total, greedy)


@torch.no_grad()
def greedy_request(model, context, length):
    tokens = list(context)
    for _ in range(length):
        tokens.append(model(torch.tensor([tokens])).logits[0, -1].argmax().item())
    return Request(context, tokens[len(context) :])


def test_scores_equal_the_slow_twin(model):
    requests = [*some_requests(), greedy_request(model, [1, 9, 8], 4), greedy_request(model, [1, 77], 1)]
    fast, slow = score(model, requests), [score_slowly(model, request) for request in requests]
    assert [found.logprob for found in fast] == pytest.approx([found.logprob for found in slow], abs=5e-5)
    assert [found.greedy for found in fast] == [found.greedy for found in slow]
    assert {found.greedy for found in fast} == {True, False}


def test_scores_do_not_depend_on_order_and_hardly_on_the_batch(model):
    requests = some_requests(1)
    fast = score(model, requests)
    assert score(model, requests[::-1])[::-1] == fast
    for batch_tokens in (1, 60, 10**6):
        other = score(model, requests, batch_tokens)
        assert [found.logprob for found in other] == pytest.approx([found.logprob for found in fast], abs=5e-5)


def test_progress_counts_every_request_and_training_mode_stays(model):
    requests, seen = some_requests(2), []
    model.train()
    score(model, requests, 100, seen.append)
    assert model.training
    model.eval()
    assert sum(seen) == len(requests)
    assert len(seen) > 3


def _scores_of_rank(world, directory, requests):
    return score(load_model(directory, world, wiring="ladder:last-half"), requests)


def test_two_ranks_score_as_one(model, demo_dir):
    requests = some_requests(3)
    alone, ranks = score(model, requests), run_on_ranks(2, _scores_of_rank, demo_dir, requests)
    assert ranks[0] == ranks[1]
    assert [found.logprob for found in ranks[0]] == pytest.approx([found.logprob for found in alone], abs=5e-5)
    assert [found.greedy for found in ranks[0]] == [found.greedy for found in alone]


@pytest.mark.parametrize(("context", "stride"), [(64, 64), (64, 32), (50, 7), (300, 1), (512, 512)])
def test_perplexity_equals_the_strided_protocol(model, context, stride):
    """The twin: loop over windows, labels of earlier tokens masked, as transformers' guide does it."""
    draw = random.Random(4)
    ids = [draw.randrange(512) for _ in range(200)]
    nats, tokens, previous = 0.0, 0, 0
    for begin in range(0, len(ids), stride):
        end = min(begin + context, len(ids))
        window = torch.tensor([ids[begin:end]])
        labels = window.clone()
        labels[:, : previous - begin] = -100
        with torch.no_grad():
            logits = model(window).logits
        nats += F.cross_entropy(logits[0, :-1], labels[0, 1:], ignore_index=-100, reduction="sum").item()
        tokens += int((labels[0, 1:] != -100).sum())
        previous = end
        if end == len(ids):
            break
    found = perplexity(model, ids, context, stride)
    assert found.tokens == tokens
    assert found.nats == pytest.approx(nats, rel=1e-5)
    assert sum(count for count, _ in found.windows) == tokens
    assert found.ppl == pytest.approx(torch.tensor(nats / tokens).exp().item(), rel=1e-4)


def test_windows_score_every_token_once():
    ids = list(range(100, 400))
    scored = [token for window in windows_of(ids, 64, 20) for token in window.continuation]
    assert scored == ids[1:]
    # Without overlap a window's first token has nothing before it.
    assert [len(window.continuation) for window in windows_of(ids, 100, 100)] == [99, 99, 99]


@pytest.mark.parametrize(
    ("ids", "context", "stride", "message"),
    [
        ([1, 2, 3], 8, 9, "between 1 and the context of 8, got 9"),
        ([1, 2, 3], 8, 0, "got 0"),
        ([1], 8, 4, "1 token"),
        ([1, 2], 1, 1, "2 tokens"),
    ],
)
def test_windows_refuse_what_cannot_be(ids, context, stride, message):
    with pytest.raises(ValueError, match=message):
        windows_of(ids, context, stride)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request([], [1]), "request 1 has no context"),
        (Request([1], []), "request 1 has no continuation"),
        (Request([1], [600]), "holds token 600, the model knows 512"),
        (Request([1] * 512, [2, 3]), "has 514 tokens, the model's context is 512"),
    ],
)
def test_requests_the_model_cannot_answer(model, request_, message):
    with pytest.raises(ValueError, match=message):
        score(model, [Request([1], [2]), request_])


def test_files_carry_everything(model, tmp_path):
    windows = windows_of([request.context[0] for request in some_requests(6)], 20, 10)
    requests = Requests({"loglikelihood": some_requests(5), "perplexity": windows}, {"tasks": ["x"]})
    requests.save(tmp_path / "r.jsonl.gz")
    again = Requests.load(tmp_path / "r.jsonl.gz")
    assert again == Requests(
        {name: [Request(*map(list, one)) for one in group] for name, group in requests.groups.items()}, requests.about
    )
    again.save(tmp_path / "again.gz")
    assert (tmp_path / "again.gz").read_bytes() == (tmp_path / "r.jsonl.gz").read_bytes()
    scores = score_all(model, again, 500)
    scores.save(tmp_path / "s.json")
    read = load_scores(tmp_path / "s.json")[""]
    assert [read[request] for request in requests.groups["loglikelihood"]] == score(
        model, requests.groups["loglikelihood"], 500
    )
    assert perplexity_of(windows, [read[window] for window in windows]) == perplexity_of(windows, score(model, windows, 500))
    with pytest.raises(ValueError, match="has no score"):
        read[Request([1], [1, 2, 3])]


def test_the_command_scores_a_file(demo_dir, tmp_path, model):
    requests = Requests({"loglikelihood": some_requests(7)})
    requests.save(tmp_path / "r.jsonl.gz")
    words = [demo_dir, tmp_path / "r.jsonl.gz", tmp_path / "s.json", "--wiring", "ladder:last-half"]
    done = run_program(*words, module="ladder_residual.evaluate.score")
    assert done.returncode == 0, done.stderr
    document = json.loads((tmp_path / "s.json").read_text())
    assert document["wiring"] == "ladder:3-4"
    assert {"commit", "date", "machine", "torch", "dtype", "tp", "seconds"} <= document.keys()
    read = load_scores(tmp_path / "s.json")[""]
    assert [read[request] for request in requests.groups["loglikelihood"]] == score(model, requests.groups["loglikelihood"])


def test_the_command_says_what_is_wrong(demo_dir, tmp_path, monkeypatch, capsys):
    (tmp_path / "r.gz").write_text("no archive")
    monkeypatch.setattr(sys, "argv", ["score", str(demo_dir), str(tmp_path / "r.gz"), str(tmp_path / "s.json")])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 2
    assert "error: cannot read the requests" in capsys.readouterr().err


def test_damaged_files_are_named(tmp_path):
    import gzip

    def requests_file(*lines):
        (tmp_path / "r.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
        return tmp_path / "r.gz"

    header = json.dumps({"format": "ladder-residual requests 1", "groups": {"a": 2}})
    for lines, message in [
        (["{}"], "is no requests file"),
        ([], "line 1: not JSON"),
        ([header, "[[1],[2]]", "[[1],[2"], "line 3: not JSON"),
        ([header, "[[1],[]]"], "line 2: expected"),
        ([header, "[[1],[-4]]"], "line 2: expected"),
        ([header, "[[1],[true]]"], "line 2: expected"),
        ([header, "[[1],[2]]"], "announces 2 requests and holds 1"),
        ([header.replace("2", '"2"')], "is no requests file"),
    ]:
        with pytest.raises(ValueError, match=message):
            Requests.load(requests_file(*lines))
    for text in ("", "[]", "{}", '{"format": "ladder-residual scores 1", "scores": {"a": 1}}'):
        (tmp_path / "s.json").write_text(text)
        with pytest.raises(ValueError, match="is no scores file"):
            load_scores(tmp_path / "s.json")
    for odd in ("NaN", "1e999", "1" * 400):
        (tmp_path / "s.json").write_text(f'{{"format": "ladder-residual scores 1", "scores": {{"a": [{odd}, 1]}}}}')
        with pytest.raises(ValueError, match="is no scores file"):
            load_scores(tmp_path / "s.json")
    packed = bytearray(requests_file(header, *["[[1],[2]]"] * 2).read_bytes())
    packed[12] ^= 0xFF
    (tmp_path / "r.gz").write_bytes(packed)
    with pytest.raises(ValueError, match="cannot read the requests"):
        Requests.load(tmp_path / "r.gz")
    (tmp_path / "s.json").write_text('{"before": {"format": "ladder-residual scores 1"}}')
    with pytest.raises(ValueError, match="s.json, before is no scores file"):
        load_scores(tmp_path / "s.json")
    with pytest.raises(ValueError, match="cannot read"):
        load_scores(tmp_path / "none.json")[""]
